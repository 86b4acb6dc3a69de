"""Eigenvalue solvers for symmetric operators."""
