"""Tables and pictures of readiness reports and of the readiness study."""
