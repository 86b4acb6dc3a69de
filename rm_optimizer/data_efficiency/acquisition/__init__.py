"""Choice of pairs to label: the pool of pairs, and acquisition functions that score pairs or choose a batch."""
