"""What a measurement leaves behind: whole files, logs that go on after a kill, provenance and run folders."""
