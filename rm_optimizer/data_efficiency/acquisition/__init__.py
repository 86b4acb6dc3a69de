"""Choice of pairs to label: the pool, and rules that score its pairs or design a batch."""
