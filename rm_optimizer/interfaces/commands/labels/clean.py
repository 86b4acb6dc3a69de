"""`rm-opt data clean`: pairs without those that are probably labeled wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from rm_optimizer.errors import ConfigError
from rm_optimizer.interfaces.pairs import PairOptions


def data_clean(
    source: PairOptions,
    data: Annotated[list[str], Argument(help="Preference pairs: files, folders or hub names.")],
    out: Annotated[Path, Option("--out", help="JSON Lines of the pairs that stay.")],
    model: Annotated[
        str | None, Option("--model", help="Take its last-layer features of the pairs, in place of words and lengths.")
    ] = None,
    false_positive_rate: Annotated[
        float, Option("--false-positive-rate", help="Largest share of right labels to take out, in (0, 1).")
    ] = 0.05,
    seed: Annotated[int, Option("--seed", min=0, help="Seed of the folds.")] = 0,
) -> None:
    """Take out pairs whose label was probably turned around, by models that have not seen their conversation.

    OUT.suspects.jsonl holds what was taken out, the least probable first; OUT.report.json says how many were expected.
    """
    from rm_optimizer.data_efficiency.cleaning.wrong_labels import held_out_chances, suspected_labels
    from rm_optimizer.data_efficiency.savings.label_pools import LabeledFeatures
    from rm_optimizer.evaluation.score_file import require_new
    from rm_optimizer.interfaces.commands.labels.features import fixed_differences
    from rm_optimizer.interfaces.saved_model import SavedModel
    from rm_optimizer.records.files import write_json_lines, write_text

    suspects_file, report_file = (out.with_name(f"{out.name}.{name}") for name in ("suspects.jsonl", "report.json"))
    for path in (out, suspects_file, report_file):
        require_new(path)
    if not 0 < false_positive_rate < 1:
        raise ConfigError(f"--false-positive-rate must lie in (0, 1), got {false_positive_rate}")
    pairs = source.load(data)
    found = LabeledFeatures.of(pairs, fixed_differences(pairs, None if model is None else SavedModel(model).load()))
    dynamics = held_out_chances(*found.turned(seed), found.groups, seed=seed)
    suspects = suspected_labels(dynamics.confidence, false_positive_rate=false_positive_rate)
    is_suspect = set(suspects.positions)
    chances = dynamics.confidence
    rows = [{**pairs[place].to_dict(), "chance": chances[place]} for place in suspects.positions]
    write_json_lines(suspects_file, rows)
    write_json_lines(out, [pair.to_dict() for place, pair in enumerate(pairs) if place not in is_suspect])
    write_text(report_file, suspects.to_json() + "\n")
    print(f"{len(pairs) - len(is_suspect):,} of {len(pairs):,} pairs stay: {out}")
    print(
        f"{len(is_suspect):,} labels are suspected, {suspects.num_wrong:,.0f} of them expected to be wrong, at "
        f"{suspects.false_positive_rate:.1%} of the right ones: {suspects_file}"
    )
    if suspects.flipped_share == 0:
        print("the labels are no noisier than the models expect of people who disagree, so none is suspected")
    else:
        print(f"estimated share of wrong labels: {suspects.flipped_share:.0%}")
    print(f"held-out accuracy of the linear models: {dynamics.correctness.mean():.1%}; near 50% they tell nothing")
