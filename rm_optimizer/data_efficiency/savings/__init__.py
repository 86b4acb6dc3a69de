"""Labels that acquisition functions save: pools for the measurement, the study, and its statistics."""
