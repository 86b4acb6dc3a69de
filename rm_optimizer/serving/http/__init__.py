"""The HTTP application: routes, limits, keys and connections."""
