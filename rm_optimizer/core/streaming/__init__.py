"""Pairs that do not fit into memory, streamed from files in an order that the seed decides."""
