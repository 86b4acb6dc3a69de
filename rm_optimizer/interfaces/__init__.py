"""The `rm-opt` command line."""
