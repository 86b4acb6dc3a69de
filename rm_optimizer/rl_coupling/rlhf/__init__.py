"""Reinforcement learning of a policy against a reward model, by TRL, with every checkpoint measured."""
