"""Train a reward model on the rows of a table: `python examples/train_from_table.py [OPTION=VALUE ...]`.

The options are those of `rm-opt train`. The model is in `best` of the run folder, `outputs/from_table` by default.
"""

import sys

from rm_optimizer import train_reward_model

# A pandas data frame, a datasets.Dataset or a path is taken as well.
ROWS = [
    {"prompt": f"What is {a} + {b}?", "chosen": f"It is {a + b}.", "rejected": f"It is {a + b + 1 + a % 3}."}
    for a in range(20)
    for b in range(20)
]


def main() -> None:
    """Train on nine tenths of the prompts, validate on the others, and print where the model is."""
    options = dict(option.split("=", 1) for option in sys.argv[1:])
    folder = options.pop("output_dir", "outputs/from_table")
    result = train_reward_model(model_name="tiny", data_path=ROWS, epochs=1, output_dir=folder, options=options)
    print(f"accuracy {result.metrics.accuracy.value:.3f} on {result.data.val_pairs} pairs; model: {result}")


if __name__ == "__main__":
    main()
