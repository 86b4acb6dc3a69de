"""Explanation of a difference between two scorings of the same conversations."""
