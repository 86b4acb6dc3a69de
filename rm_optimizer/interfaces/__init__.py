"""What a person starts: the `rm-opt` command line."""
