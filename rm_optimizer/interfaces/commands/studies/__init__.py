"""`rm-opt study`: studies of what rm-opt claims, each one command that goes on when repeated."""
