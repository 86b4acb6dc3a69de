"""Comparison of finished runs, and studies of many trials that continue after a kill."""
