"""Measure the curvature of a trained model's loss: `python examples/spectrum_of_a_run.py RUN PAIRS [NUM_PAIRS]`."""

import sys

from rm_optimizer import BradleyTerryRM, HessianAnalyzer, PreferenceDataset
from rm_optimizer.landscape import summarize


def main() -> None:
    """Print the largest eigenvalues of the Hessian with their error bounds, and what they determine."""
    run, path, *number = sys.argv[1:]
    model = BradleyTerryRM.from_pretrained(run)
    analyzer = HessianAnalyzer(model, params="head", seed=0)  # params="trainable" for all weights
    pairs = PreferenceDataset.load(path)
    spectrum = analyzer.compute_spectrum(pairs, num_pairs=int(number[0]) if number else 64, top_k=4)
    for value, bound in zip(spectrum.eigenvalues, spectrum.error_bounds, strict=True):
        print(f"eigenvalue {value:.6g} ± {bound:.2g}")
    for name, quantity in summarize(spectrum).items():
        if quantity.value is not None:
            print(f"{name}: {quantity.value:.6g}")


if __name__ == "__main__":
    main()
