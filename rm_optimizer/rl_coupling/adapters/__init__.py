"""Reward functions for TRL, OpenRLHF and verl from reward models."""
