"""`rm-opt compare`: comparisons of finished runs and of optimizers, and studies of many runs."""
