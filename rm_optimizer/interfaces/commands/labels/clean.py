"""`rm-opt data clean`: a data set without the pairs whose label is probably wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from rm_optimizer.errors import ConfigError
from rm_optimizer.interfaces.pairs import PairOptions


def data_clean(
    source: PairOptions,
    data: Annotated[list[str], Argument(help="Preference pairs: files, folders or hub names.")],
    out: Annotated[Path, Option("--out", help="JSON Lines file for the pairs that stay.")],
    model: Annotated[
        str | None, Option("--model", help="Model whose last-layer features are used, in place of words and lengths.")
    ] = None,
    false_positive_rate: Annotated[
        float, Option("--false-positive-rate", help="Largest share of right labels to remove, in (0, 1).")
    ] = 0.05,
    seed: Annotated[int, Option("--seed", min=0, help="Seed of the cross-validation folds.")] = 0,
) -> None:
    """Remove pairs whose label was probably flipped.

    The labels are judged by models that were not trained on their conversation. OUT.suspects.jsonl holds the removed
    pairs, the least probable label first. OUT.report.json holds the expected number of wrong labels among them.
    """
    import numpy as np

    from rm_optimizer.core.pairs.overlap import conversation_groups
    from rm_optimizer.core.tokens.dataset import PreferenceDataset
    from rm_optimizer.data_efficiency.linear_reward import fixed_differences
    from rm_optimizer.data_efficiency.margin_analysis import held_out_chances, suspected_labels, turned
    from rm_optimizer.evaluation.score_file import require_new
    from rm_optimizer.interfaces.saved_model import SavedModel
    from rm_optimizer.records.files import write_json_lines, write_text

    suspects_file, report_file = (out.with_name(f"{out.name}.{name}") for name in ("suspects.jsonl", "report.json"))
    for path in (out, suspects_file, report_file):
        require_new(path)
    if not 0 < false_positive_rate < 1:
        raise ConfigError(f"--false-positive-rate must lie in (0, 1), got {false_positive_rate}")
    pairs = source.load(data)
    judged = [place for place, pair in enumerate(pairs) if pair.label == 1]
    if num_soft := len(pairs) - len(judged):
        print(f"{num_soft:,} pairs with a tie or a soft label stay, and are not judged")
    plain = PreferenceDataset([pairs[place] for place in judged])
    differences = fixed_differences(plain, None if model is None else SavedModel(model).load())
    groups = np.array(conversation_groups([pair.prompt for pair in plain]))
    dynamics = held_out_chances(*turned(differences, seed), groups, seed=seed)
    found = suspected_labels(dynamics.confidence, false_positive_rate=false_positive_rate)
    chances = dynamics.confidence[[*found.positions]].tolist()
    suspects = replace(found, positions=tuple(judged[position] for position in found.positions))
    accuracy = float(dynamics.correctness.mean())
    places = set(suspects.positions)
    rows = [{**pairs[place].to_dict(), "chance": c} for place, c in zip(suspects.positions, chances, strict=True)]
    write_json_lines(suspects_file, rows)
    write_json_lines(out, [pair.to_dict() for place, pair in enumerate(pairs) if place not in places])
    write_text(report_file, suspects.to_json() + "\n")
    print(f"{len(pairs) - len(places):,} of {len(pairs):,} pairs stay: {out}")
    print(
        f"{len(places):,} labels are suspected, {suspects.num_wrong:,.0f} of them expected to be wrong, at "
        f"{suspects.false_positive_rate:.1%} of the right ones: {suspects_file}"
    )
    if suspects.flipped_share == 0:
        print("the labels are no noisier than the models expect of people who disagree, so none is suspected")
    else:
        print(f"estimated share of wrong labels: {suspects.flipped_share:.0%}")
    print(f"held-out accuracy of the linear models: {accuracy:.1%}; near 50% they tell nothing")
