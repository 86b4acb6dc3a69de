"""Comparison of finished runs, studies of many trials that continue after a kill, and a study of five hypotheses."""
