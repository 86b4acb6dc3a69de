"""Loggers beside `metrics.csv`: TensorBoard and Weights & Biases."""
