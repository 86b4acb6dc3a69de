"""Evaluation of reward models on pairs and responses."""
