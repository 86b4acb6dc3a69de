"""Train a reward model on the rows of a table: `python examples/train_from_table.py [OPTION=VALUE ...]`.

The options are those of `rm-opt train`. The model is in `best` of the run folder, `outputs/from_table` by default.
"""

import sys

from rm_optimizer import PreferenceDataset, PreferencePair, TrainConfig, TrainVal, compose, train_reward_model, typed

# A pandas data frame gives such rows with frame.to_dict("records").
ROWS = [
    {"prompt": f"What is {a} + {b}?", "chosen": f"It is {a + b}.", "rejected": f"It is {a + b + 1 + a % 3}."}
    for a in range(20)
    for b in range(20)
]


def main() -> None:
    """Train on nine tenths of the prompts, validate on the others, and print where the model is."""
    pairs = PreferenceDataset(PreferencePair(row["prompt"], row["chosen"], row["rejected"]) for row in ROWS)
    data = TrainVal(*pairs.split_by_prompt(0.1, seed=0))
    options = ["model=tiny", "training.epochs=1", "output_dir=outputs/from_table"]
    given = {option.partition("=")[0] for option in sys.argv[1:]}
    options = [option for option in options if option.partition("=")[0] not in given]
    result = train_reward_model(typed(compose([*options, *sys.argv[1:]]), TrainConfig), data=data)
    print(f"accuracy {result.metrics.accuracy.value:.3f} on {len(data.val)} pairs; model: {result.export}")


if __name__ == "__main__":
    main()
