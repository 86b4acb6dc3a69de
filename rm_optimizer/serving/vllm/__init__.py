"""The vLLM engine: plugin, launch, and weights of a running vLLM server."""
