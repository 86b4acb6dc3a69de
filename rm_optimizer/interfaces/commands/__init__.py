"""The commands of rm-opt, one file each."""
