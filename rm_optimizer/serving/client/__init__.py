"""Clients of a reward server."""
