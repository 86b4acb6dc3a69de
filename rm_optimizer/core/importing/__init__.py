"""Reward models of other software, brought into one certified form."""
