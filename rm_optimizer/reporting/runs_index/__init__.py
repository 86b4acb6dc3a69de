"""Index of a folder of runs and studies, for a browser on this machine."""
