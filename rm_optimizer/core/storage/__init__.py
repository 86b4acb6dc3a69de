"""Reward models on disk: loading, checkpoints, exports with their certificate, adapters."""
