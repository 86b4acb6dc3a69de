"""Preference pairs: their types, formats, sources, data sets, splits, audit and the synthetic world."""
