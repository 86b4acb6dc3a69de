"""Reward models as the reward functions of TRL, OpenRLHF and verl."""
