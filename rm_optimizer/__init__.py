"""RM-Optimizer: train, measure and serve Bradley-Terry reward models."""

__version__ = "0.1.0"
