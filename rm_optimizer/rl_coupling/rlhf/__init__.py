"""Reinforcement learning of a policy against a reward model with TRL, and a measurement of every checkpoint."""
