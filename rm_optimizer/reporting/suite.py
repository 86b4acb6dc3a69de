"""Tables, figure and page of models on suites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console

from rm_optimizer.errors import DataError
from rm_optimizer.evaluation.suite_scores import CREDITS_FILE, SUITE_FILE, SuiteCredits, SuiteResult, SuiteScores
from rm_optimizer.experiments.trial import stored
from rm_optimizer.reporting.document import Answer, Document, Drawing, Listing, Part
from rm_optimizer.reporting.figures import BLUE, GRAY, new_figure, save_figure
from rm_optimizer.reporting.run_report import PICTURES
from rm_optimizer.reporting.tables import Cell, TextTable, print_tables

_MOST_PRINTED = 15
"""Most groups that a terminal shows; files and pages have all."""


def _ordered(result: SuiteResult) -> list[SuiteScores]:
    """Rows of the table from the highest official number down."""
    return sorted(result.models, key=lambda model: -model.scores[result.score].value)


def suite_tables(result: SuiteResult) -> dict[str, TextTable]:
    """Tables of a result by name.

    They are averages, groups, differences, leads, and facts about the scoring.
    """
    ordered, score = _ordered(result), result.score
    names = [*ordered[0].scores]
    averages = [name for name in names if name == score or name in result.suite["average"]]
    suite = result.suite["name"]
    title = f"{suite}, {result.num_rows:,} rows, {score} is its official number [95 % interval]"
    leads = f"Leads, by intervals that hold together for {len(ordered)} rows and {len(names)} names"
    return {
        "averages": TextTable.of(
            title, ({"": each.name} | {name: each.scores[name] for name in averages} for each in ordered)
        ),
        "groups": TextTable.of(
            f"Groups of {suite}",
            ({"": name} | {each.name: each.scores[name] for each in ordered} for name in names if name not in averages),
        ),
        "differences": TextTable.of(
            f"Differences in {score}, paired by prompt",
            (
                {"": each.first, "minus": each.second, "difference": each.difference, "p (Holm)": f"{each.holm_p:.2g}"}
                for each in result.differences
            ),
        ),
        "leads": TextTable.of(
            leads, ({"": each.group, "model": each.model, "leads by at least": each.low} for each in result.leads)
        ),
        "scoring": TextTable.of("Scoring", (_facts(each, result) for each in ordered if each.is_model)),
    }


def _facts(model: SuiteScores, result: SuiteResult) -> dict[str, Cell]:
    seen = model.trained_on
    return {
        "": model.name,
        "weights": model.dtype,
        "length limit": model.max_length,
        "prompts cut": model.num_prompt_cut,
        "responses cut": model.num_response_cut,
        "of": result.num_responses,
        "exact ties": model.num_ties,
        "pairs trained on": None if seen is None else seen.num_pairs,
        "prompts trained on": None if seen is None else seen.num_prompts,
    }


def print_suite(result: SuiteResult, console: Console | None = None) -> None:
    """Print the tables of a result, and notes on how to read them."""
    tables, notes = suite_tables(result), result.notes
    if (num := len(tables["groups"].rows)) > _MOST_PRINTED:
        del tables["groups"]
        notes = (f"{SUITE_FILE} has the scores of {num} groups", *notes)
    print_tables(tables.values(), notes, console)


def write_suite(result: SuiteResult, folder: Path) -> None:
    """Write `suite.json`, `suite.parquet` and `plots/suite.png`, each file completely or not at all."""
    result.write(folder)
    save_figure(plot_suite(result), folder / PICTURES / "suite.png")


def plot_suite(result: SuiteResult) -> Figure:
    """Official number of each row of the table, with its interval.

    The interval is at 95 %, over prompts.
    """
    ordered, title = _ordered(result), f"{result.suite['name']}: {result.score}"
    caption = f"n = {result.num_rows:,} rows; bars: 95 % intervals over prompts"
    figure, (axes,) = new_figure(title, caption, height=2.2 + 0.4 * len(ordered))
    for place, model in enumerate(ordered):
        axes.named(place, model.name, model.scores[result.score], color=BLUE if model.is_model else GRAY)
    axes.set_yticks(range(len(ordered)), [model.name for model in ordered])
    axes.set(ylim=(len(ordered) - 0.5, -0.5), xlabel=result.score)
    return figure


def suite_document(results: Sequence[SuiteResult], title: str) -> Document:
    """Content of the page of results on one or several suites.

    Args:
        results: a result for each suite.
        title: title of the page.
    """
    parts, lines = list[Part](), list[str]()
    for result in results:
        name, (averages, *others) = str(result.suite["name"]), suite_tables(result).items()
        best = next(model for model in _ordered(result) if model.is_model)
        lines.append(f"{name}: {best.name} has {best.scores[result.score]}")
        drawing = Drawing(f"{name}_scores", plot_suite(result), "Official number of each model, with its interval")
        blocks = [Listing(f"{name}_{key}", table, first=20) for key, table in (averages, *others)]
        parts.append(Part(name, (blocks[0], drawing, *blocks[1:], result.notes)))
    num_models = len({model.name for result in results for model in result.models if model.is_model})
    headline = f"{num_models} model{'s' * (num_models > 1)} on {len(results)} suite{'s' * (len(results) > 1)}"
    return Document(title, Answer("open", headline, tuple(lines)), parts)


def read_result(path: Path) -> SuiteResult | None:
    """Result of a file, or None without the file.

    Raises:
        ConfigError: if it is damaged.
    """
    return stored(SuiteResult, path, remedy="; remove it, or evaluate its models again")


def stored_results(folder: Path) -> list[SuiteResult]:
    """Results of all models in a folder and those below it.

    There is one for each suite, with the newest of each model. Scores, differences and leads are over all of them
    together, by their stored credits.

    Raises:
        ConfigError: if a result is damaged.
        DataError: if there is no result, or two results of a suite have other rows or rules.
    """
    found = dict[str, SuiteResult]()
    for path in sorted(folder.rglob(SUITE_FILE), key=lambda path: (path.stat().st_mtime, path)):
        if (result := read_result(path)) is None:
            continue
        credits = SuiteCredits.read(path.with_name(CREDITS_FILE), result)
        name = credits.suite.name
        if (before := found.get(name)) is not None and before.credits is not None:
            same = (before.suite, before.fingerprint) == (result.suite, result.fingerprint)
            if not same or (before.credits.groups, before.credits.clusters) != (credits.groups, credits.clusters):
                raise DataError(f"{path} has other rows or rules of {name} than other results; move it elsewhere")
            models = {model.name: model for model in (*before.models, *result.models)}
            result = replace(result, models=tuple(models.values()))
            credits = replace(credits, values={**before.credits.values, **credits.values})
        found[name] = replace(result, credits=credits)
    if not found:
        raise DataError(f"{folder}: there is no result of rm-opt evaluate --suite ({SUITE_FILE}) in it or below it")
    return [each.scored(each.credits) for each in found.values() if each.credits is not None]
