"""`rm-opt compare`: finished runs, optimizers, hypotheses, and studies of many runs."""
