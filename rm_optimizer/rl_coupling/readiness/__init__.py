"""Readiness of a reward model for reinforcement learning: features, a fitted score, and its report."""
