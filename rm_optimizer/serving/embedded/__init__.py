"""The embedded engine: a transformers model in a separate process."""
