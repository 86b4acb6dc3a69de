"""The commands around labels: which to ask for, how to ask, which are wrong, and how many more to buy."""
