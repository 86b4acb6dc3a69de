"""Pairs of a run: in memory or streamed, loaded and batched."""
