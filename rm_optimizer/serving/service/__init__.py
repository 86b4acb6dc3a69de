"""The scoring service: requests to token ids, the queue, parity, and failures as typed answers."""
