"""Cost of cross-fitting all of the largest eigenvalues, as `rm-opt analyze` does by default."""

from __future__ import annotations

import argparse
from functools import partial
from statistics import median

from landscape_subjects import Subject, ours, timed


def measure_cross_fit(args: argparse.Namespace, subject: Subject) -> dict[str, float]:
    """Time of the preset's analysis with all `top_k` cross-fitted, in that of one without; the two take turns."""
    preset = partial(ours, subject, args.top_k, which="both", num_probes=20, sam_rho=0.05)
    without, ratios = [], []
    for _ in range(args.rounds):
        plain, fitted = (timed(partial(preset, num_sampled=count))[1] for count in (0, args.top_k))
        without.append(plain)
        ratios.append(fitted / plain)
    return {"cross_fit_ratio": median(ratios), "seconds_without_cross_fit": median(without)}
