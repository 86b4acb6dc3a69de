"""Labels that a rule saves: pools to measure on, the study, and its statistics."""
