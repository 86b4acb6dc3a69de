"""Measure the curvature of a trained model's loss: `python examples/spectrum_of_a_run.py RUN PAIRS [NUM_PAIRS]`."""

import sys

from rm_optimizer import BradleyTerryRM, HessianAnalyzer


def main() -> None:
    """Print the largest eigenvalues of the Hessian with their error bounds, and what they determine."""
    run, path, *number = sys.argv[1:]
    model = BradleyTerryRM.from_pretrained(run)
    analyzer = HessianAnalyzer(model, params="head", seed=0)  # params="trainable" for all weights
    spectrum = analyzer.compute_spectrum(path, num_pairs=int(number[0]) if number else 64, top_k=4)
    for value, bound in zip(spectrum.eigenvalues, spectrum.error_bounds, strict=True):
        print(f"eigenvalue {value:.6g} ± {bound:.2g}")
    print(spectrum)


if __name__ == "__main__":
    main()
