"""Readiness as a table, a picture and a page."""
