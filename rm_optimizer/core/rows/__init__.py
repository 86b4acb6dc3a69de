"""Rows of files and data sets: readers, columns, messages, and the rows that are refused."""
