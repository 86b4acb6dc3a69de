"""Doctor: checks of data, model and rewards, each with a measurement and a verdict."""
