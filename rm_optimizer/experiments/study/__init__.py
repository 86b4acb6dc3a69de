"""The study runner: a fixed list of trials that every process may help with and none repeats."""
