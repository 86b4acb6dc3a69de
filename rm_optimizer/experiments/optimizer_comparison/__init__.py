"""Fair comparison of optimizers: frozen setting, tuned learning rates, new paired seeds and an untouched test split."""
