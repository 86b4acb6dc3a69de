"""`rm-opt compare`: comparisons of finished runs, of optimizers and of hypotheses, and studies of many runs."""
