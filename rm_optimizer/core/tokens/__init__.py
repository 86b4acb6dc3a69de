"""Token sequences of conversations: rendering, caches, batch plans, shared prompts and loaders."""
