"""Rank responses by their rewards: `python examples/score_and_rank.py MODEL`.

MODEL is a run, an exported folder or a hub id.
"""

import sys

from rm_optimizer import BradleyTerryRM, RMOptimizerError

PROMPT = "How do I boil an egg?"
RESPONSES = ["Put it in boiling water for seven minutes.", "No.", "Eggs are eggs."]


def main() -> None:
    """Print the responses from the best to the worst, each with the probability that it beats the next."""
    try:
        model = BradleyTerryRM.from_pretrained(sys.argv[1])
    except RMOptimizerError as error:  # one sentence: what was expected, what was given, what to do
        sys.exit(f"error: {error}")
    rewards = model.score([PROMPT] * len(RESPONSES), RESPONSES)
    order = rewards.argsort(descending=True).tolist()
    wins = (model.beta * (rewards[order[:-1]] - rewards[order[1:]])).sigmoid().tolist()
    for index, win in zip(order, [*wins, None], strict=True):
        beats = "" if win is None else f"   beats the next with probability {win:.3f}"
        print(f"{rewards[index]:8.4f}  {RESPONSES[index]}{beats}")


if __name__ == "__main__":
    main()
