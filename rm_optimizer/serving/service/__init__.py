"""Scoring service: tokenization of requests, the queue, parity checks, and typed failures."""
