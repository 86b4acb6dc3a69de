"""Comparison of finished runs, studies of many trials that survive a kill, and five hypotheses tested by one."""
