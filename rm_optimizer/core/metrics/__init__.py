"""Agreement of rewards with preferences: metrics, calibration, collapse and intervals."""
