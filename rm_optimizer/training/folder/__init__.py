"""The run folder: start, lock, record, checkpoints, recorded steps, resumption and result."""
