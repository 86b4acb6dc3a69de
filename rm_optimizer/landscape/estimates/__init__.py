"""Stochastic estimates: trace, spectral density, sampling error, sharpness."""
