"""Studies: trials that survive a kill, and what they train and score."""
