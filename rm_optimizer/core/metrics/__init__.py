"""Agreement of rewards with preferences: metrics, calibration, collapse, intervals and effects."""
