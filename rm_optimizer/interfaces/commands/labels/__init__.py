"""The commands around labels: which to ask for, how to ask, and what they saved."""
