"""The embedded engine: processes that hold a model, on transformers or in vLLM."""
