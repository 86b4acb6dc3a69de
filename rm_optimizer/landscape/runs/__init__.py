"""Curvature and loss of several models: along a run, and between runs."""
