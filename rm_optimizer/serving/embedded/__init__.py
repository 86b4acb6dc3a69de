"""The embedded engine: a transformers model in a process of its own."""
