"""The loss along lines and over planes through the weights."""
