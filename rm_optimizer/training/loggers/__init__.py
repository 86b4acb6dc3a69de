"""Loggers in addition to `metrics.csv`: TensorBoard and Weights & Biases."""
