"""Work between optimizer steps: evaluation, checkpoints, measurements and progress."""
