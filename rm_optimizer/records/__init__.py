"""Records of a measurement: atomic files, logs that continue after a kill, provenance and run folders."""
