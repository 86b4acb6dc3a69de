"""Live weight updates: senders, receivers, transports and the weights of a served model."""
