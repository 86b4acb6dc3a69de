"""`rm-opt data check` and `rm-opt data clean`: the audit of preference data, and pairs with probably right labels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from rm_optimizer.errors import CheckpointError, DataError
from rm_optimizer.interfaces.inputs import PairOptions, SavedModel, TokenizedPairOptions, source_options
from rm_optimizer.interfaces.outputs import printed_beside, write_json
from rm_optimizer.schema.checks import require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rm_optimizer.core.rows.bad_rows import SkippedRow
    from rm_optimizer.core.tokens.audit import DataAudit
    from rm_optimizer.core.tokens.dataset import PreferenceDataset

TINY_VOCABULARY = 2048
"""Vocabulary size of the tokenizer that is trained if none is named; the same as for `model=tiny`."""
LONG_CHARACTERS = 100_000
"""Length of a response beyond which it is reported at once, since it takes seconds; no tokenizer is trained on more."""


def data_check(
    paths: Annotated[list[str], Argument(help="Files, folders or hub names of pairs; each is one split.")],
    pair_options: TokenizedPairOptions,
    tokenizer: Annotated[
        str | None, Option("--tokenizer", help="Hub id or folder of a tokenizer; default: one trained on the data.")
    ] = None,
    max_length: Annotated[
        int, Option("--max-length", min=8, help="Longest sequence in tokens; the rest is cut.")
    ] = 512,
    json_file: Annotated[Path | None, Option("--json", help="Also write the audit to this JSON file.")] = None,
    suggest: Annotated[
        bool, Option("--suggest", help="Print the shortest layout of the rows, to paste into a file, and stop.")
    ] = False,
) -> None:
    """Audit preference data.

    Reports rows, duplicates, contradictions, lengths, overlap of splits, and the length baseline.
    """
    if suggest:
        for path in paths:
            _suggest(path, pair_options)
        return
    with printed_beside(json_file):
        audit = _audited(paths, pair_options, tokenizer, max_length)
    write_json(json_file, audit.to_json())


def _suggest(path: str, pair_options: PairOptions) -> None:
    """Print the layout of a source as a file of one, and a pair as it reads it if nothing is left to fill in."""
    from rm_optimizer.core.pairs.layouts import as_yaml
    from rm_optimizer.core.pairs.source_format import first_rows, suggested_layout
    from rm_optimizer.core.pairs.sources import parse_sources
    from rm_optimizer.core.tokens.dataset import PreferenceDataset
    from rm_optimizer.reporting.data_audit import print_example
    from rm_optimizer.schema.data import Spelling

    with Spelling.flags.used():
        (source,) = parse_sources(source_options(path), pair_options.reading())
        source = replace(source, path=source.files()[0].files[0])
        first = first_rows(source)
        layout, note = suggested_layout(source, first)
    print(f"# {note}")
    lines = as_yaml(layout)
    print(*lines, sep="\n")
    if "TODO" not in str(layout):
        rows = [row for _, row in first]
        pairs = PreferenceDataset(rows, layout=layout, on_bad_row="drop", max_bad_share=1.0)
        print_example(f"{len(pairs):,} pairs of the first {len(rows):,} rows", pairs[0])


def _audited(
    paths: Sequence[str], pair_options: TokenizedPairOptions, tokenizer: str | None, max_length: int
) -> DataAudit:
    """Print the audit of the splits, and return it."""
    datasets = pair_options.load_splits(paths, "PATHS", shows_layouts=False)

    from rm_optimizer.core.rows.bad_rows import cause_of
    from rm_optimizer.core.tokens.audit import audit_pairs
    from rm_optimizer.core.tokens.chat import ConversationRenderer
    from rm_optimizer.core.tokens.splits import label_note
    from rm_optimizer.data_efficiency.votes import votes_of
    from rm_optimizer.reporting.data_audit import print_audit, print_example
    from rm_optimizer.reporting.tables import output_console, summary_table

    for name, dataset in datasets.items():
        sizes = [max(len(pair.chosen), len(pair.rejected)) for pair in dataset.pairs]
        if num_long := sum(size > LONG_CHARACTERS for size in sizes):
            most = max(sizes)
            print(
                f"WARNING: {name}: {num_long:,} of {len(sizes):,} pairs have a response of more than "
                f"{LONG_CHARACTERS:,} characters, pair {sizes.index(most) + 1:,} one of {most:,}; are the rows whole?"
            )
    if tokenizer is None:
        print(
            f"tokens of a {TINY_VOCABULARY}-entry byte-pair vocabulary trained on this data; name another: --tokenizer"
        )
    renderer = ConversationRenderer(_tokenizer(tokenizer, datasets.values()), max_length)
    datasets = {name: dataset.accepted_by(renderer) for name, dataset in datasets.items()}
    audit = audit_pairs(datasets, renderer, renderer.tokenizer.all_special_tokens)
    print_audit(audit)
    for name, dataset in datasets.items():
        print_example(name, dataset.pairs[0])
        if (note := label_note(dataset.pairs)) is not None:
            print(f"{name}: {note}")
        by_cause: defaultdict[str, list[SkippedRow]] = defaultdict(list)
        for row in dataset.skipped:
            by_cause[cause_of(row.reason)].append(row)
        for rows in by_cause.values():
            rest = f"; rows of this cause: {len(rows):,}" if len(rows) > 1 else ""
            print(f"dropped {rows[0]}{rest}")
        if (votes := votes_of(dataset.pairs)) is not None:
            from rm_optimizer.reporting.labels import agreement_rows  # imports matplotlib

            title = f"{name}: votes of annotators, {len(votes.chosen):,} pairs"
            output_console().print(summary_table(title, agreement_rows(votes.ceiling)))
    return audit


def _tokenizer(source: str | None, datasets: Iterable[PreferenceDataset]) -> PreTrainedTokenizerBase:
    from rm_optimizer.core.tokens.tokenizer import tokenizer_of_pairs
    from rm_optimizer.records.hub import hub_obstacle, restored_hub

    if source is None:
        pairs = [pair for data in datasets for pair in data.pairs]
        return tokenizer_of_pairs(pairs, TINY_VOCABULARY, longest=LONG_CHARACTERS)
    from transformers import AutoTokenizer  # takes seconds

    try:
        with restored_hub():
            if not Path(source).expanduser().exists() and (obstacle := hub_obstacle(source, "model")):
                raise CheckpointError(f"no tokenizer at '{source}': {obstacle}")
            loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"no tokenizer at '{source}': give a hub id or a folder with tokenizer files") from error
    return loaded


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
    influence: Annotated[
        Path | None, Option("--influence", help="influence.parquet of rm-opt blame on these pairs, for the suspects.")
    ] = None,
    seed: Annotated[int, Option("--seed", min=0, help="Seed of the cross-validation folds.")] = 0,
) -> None:
    """Remove pairs whose label was probably flipped.

    The labels are judged by models that were not trained on their conversation. OUT.suspects.jsonl holds the removed
    pairs, the least probable label first. OUT.report.json holds the expected number of wrong labels among them.
    """
    import numpy as np

    from rm_optimizer.core.pairs.pair import conversation_groups
    from rm_optimizer.core.tokens.dataset import PreferenceDataset
    from rm_optimizer.data_efficiency import margin_analysis
    from rm_optimizer.evaluation.score_file import require_new
    from rm_optimizer.records.files import write_json_lines, write_text

    suspects_file, report_file = (out.with_name(f"{out.name}.{name}") for name in ("suspects.jsonl", "report.json"))
    for path in (out, suspects_file, report_file):
        require_new(path)
    require(0 < false_positive_rate < 1, "--false-positive-rate", "lie in (0, 1)", false_positive_rate)
    pairs = source.load(data)
    judged = [place for place, pair in enumerate(pairs) if pair.label == 1]
    if num_soft := len(pairs) - len(judged):
        print(f"{num_soft:,} pairs with a tie or a soft label stay, and are not judged")
    plain = PreferenceDataset([pairs[place] for place in judged])
    differences = margin_analysis.fixed_differences(plain, None if model is None else SavedModel(model).load())
    groups = np.array(conversation_groups([pair.prompt for pair in plain]))
    dynamics = margin_analysis.held_out_chances(*margin_analysis.turned(differences, seed), groups, seed=seed)
    found = margin_analysis.suspected_labels(dynamics.confidence, false_positive_rate=false_positive_rate)
    chances = dynamics.confidence[[*found.positions]].tolist()
    suspects = replace(found, positions=tuple(judged[position] for position in found.positions))
    accuracy = float(dynamics.correctness.mean())
    places = set(suspects.positions)
    rows = [{**pairs[place].to_dict(), "chance": c} for place, c in zip(suspects.positions, chances, strict=True)]
    if influence is not None:
        moved = _influences(influence, [pair.pair_id for pair in pairs])
        rows = [{**row, "influence": moved[place]} for row, place in zip(rows, suspects.positions, strict=True)]
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


def _influences(path: Path, pair_ids: Sequence[str]) -> list[float]:
    """The influence of each pair, as `rm-opt blame` wrote it.

    Raises:
        DataError: if the file holds something else, or other pairs.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        found = parquet.read_table(path, columns=["pair_id", "influence"]).to_pydict()
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"--influence must be influence.parquet of rm-opt blame, got {path} ({error})") from error
    if found["pair_id"] != pair_ids:
        raise DataError(f"--influence {path} is of other pairs, or of another order, than DATA; blame these pairs")
    values: list[float] = found["influence"]
    return values
