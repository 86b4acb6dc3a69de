"""Fair comparison of optimizers: frozen setting, tuned learning rates, fresh paired seeds, an untouched test split."""
