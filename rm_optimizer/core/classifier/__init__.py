"""The transformers classifier under a reward model: head, pooling, attention, adapters and limits."""
