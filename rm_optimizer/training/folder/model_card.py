"""Model card of an exported model: `README.md` next to its weights, written from the run's records."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from rm_optimizer.core.importing.publishing import CARD_FILE, use_of
from rm_optimizer.core.metrics.pairwise import LEAST_PAIRS, PairwiseMetrics
from rm_optimizer.errors import DataError
from rm_optimizer.records.files import write_text
from rm_optimizer.records.locations import EXPORT_FILE
from rm_optimizer.records.quoting import markdown_line, markdown_table
from rm_optimizer.records.run_folder import DOCTOR_FILE, RunFolder
from rm_optimizer.records.run_options import paths_of
from rm_optimizer.training.folder.record import TOY_WARNING, RunResult, is_toy

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_METRICS = {"accuracy": "Accuracy", "nll": "Negative log-likelihood", "brier": "Brier score", "ece": "ECE"}


def write_card(run_dir: Path, result: RunResult) -> Path:
    """Write the card of a run's exported model, in place of an earlier one, and return its file.

    Args:
        run_dir: the run folder.
        result: its result.

    Raises:
        DataError: if the folder holds no exported model.
    """
    card = model_card(run_dir, result)
    export = RunFolder(run_dir).export
    if not (export / EXPORT_FILE).is_file():
        raise DataError(f"{export} holds no exported model, which a card could describe; export the model again")
    return write_text(export / CARD_FILE, card)


def model_card(run_dir: Path, result: RunResult) -> str:
    """Text of the card: metadata for the hub, then a summary, numbers, weaknesses and use of the model.

    Every number is a rounded one of `run.json` or of `rm-opt doctor`'s diagnosis. Paths of the machine are omitted.

    Args:
        run_dir: the run folder.
        result: its result.
    """
    title, max_length = card_title(result), result.data.truncation["val"]["max_length"]
    use = use_of(Path(result.export), max_length, result.config["model"].get("pooling_head"))
    text = f"{card_summary(result)}\n\n{card_sections(run_dir, result)}\n\n## How to use\n\n{use}"
    return f"---\n{_metadata(title, result)}\n---\n\n# {title}\n\n{text}\n"


def card_title(result: RunResult) -> str:
    """Name of the model as a heading."""
    return f"{result.model} reward model"


def card_sections(run_dir: Path, result: RunResult) -> str:
    """Results, calibration, known weaknesses and training as Markdown."""
    sections = {
        "Results": _results(result),
        "Calibration": _calibration(result.metrics),
        "Known weaknesses": "\n".join(
            f"- {markdown_line(sentence)}" for sentence in [*_measured_weaknesses(result), *_diagnosed(run_dir)]
        ),
        "Training": _training(run_dir, result),
    }
    return "\n\n".join(f"## {name}\n\n{text}" for name, text in sections.items())


def _metadata(title: str, result: RunResult) -> str:
    path = result.config["model"]["path"]
    trained_on = [name for name in paths_of(result.config["data"]["train"]) if _is_hub_name(name)]
    evaluated = [
        EvalResult(
            task_type="text-classification",
            task_name="preference prediction",
            dataset_type="preference-pairs",
            dataset_name=_validation(result),
            metric_type=name,
            metric_name=label,
            metric_value=getattr(result.metrics, name).value,
        )
        for name, label in _METRICS.items()
        if math.isfinite(getattr(result.metrics, name).value)
    ]
    return ModelCardData(
        base_model=path if _is_hub_name(path) else None,
        datasets=trained_on or None,
        library_name="transformers",
        pipeline_tag="text-classification",
        tags=["reward-model", "bradley-terry", "rlhf", "rm-optimizer"],
        model_name=title,
        eval_results=evaluated,
    ).to_yaml()


def card_summary(result: RunResult) -> str:
    """Paragraph on the meaning of the model's numbers."""
    base = "random weights" if result.config["model"]["path"] is None else f"`{_named(result.config['model']['path'])}`"
    return (
        f"A Bradley-Terry reward model from {base}: it gives a response to a prompt one number, and prefers response a "
        f"to b with probability sigmoid({result.metrics.beta:g} (reward(a) − reward(b))). Rewards compare responses to "
        "one prompt; between prompts they say nothing."
    )


def _results(result: RunResult) -> str:
    metrics, data = result.metrics, result.data
    rows = {"validation pairs": f"{metrics.num_pairs} ({_validation(result)})", "prompts": str(metrics.num_prompts)}
    if metrics.collapse.collapsed:
        rows["verdict"] = f"**{metrics.collapse.reason}**"
    rows["accuracy"] = str(metrics.accuracy)
    if not math.isnan(metrics.longer_wins.value):
        rows["length baseline (the longer response wins)"] = str(metrics.longer_wins)
        rows["accuracy − length baseline"] = str(metrics.over_length)
    if data.ceiling is not None:
        rows["accuracy of the true reward"] = f"{data.ceiling:.3f}"
    rows["NLL (chance: log 2)"] = str(metrics.nll)
    rows["mean margin"] = str(metrics.mean_margin)
    parts = [markdown_table(("", "value [95 % interval]"), rows.items())]
    for column, groups in metrics.groups.items():
        listed = sorted(groups.items(), key=lambda item: (-item[1].num_pairs, item[0]))
        lines = [(name, str(group.num_pairs), str(group.accuracy)) for name, group in listed]
        parts.append(markdown_table((column, "pairs", "accuracy"), lines))
    return "\n\n".join(parts)


def _calibration(metrics: PairwiseMetrics) -> str:
    fit = metrics.temperature
    advice = (
        f"The temperature that calibrates it is {fit.temperature:.3f}."
        if fit.temperature is not None
        else f"No temperature calibrates it: {fit.reason}."
    )
    rows = {
        "ECE": str(metrics.ece),
        "ECE of a perfect model on as many pairs": f"{metrics.ece_noise_floor:.3f}",
        "Brier score": str(metrics.brier),
    }
    return f"{markdown_table(('', 'value [95 % interval]'), rows.items())}\n\n{advice}"


def _measured_weaknesses(result: RunResult) -> Iterator[str]:
    metrics = result.metrics
    if metrics.collapse.collapsed:
        yield f"The rewards do not tell responses apart: {metrics.collapse.reason}."
    if is_toy(result.config["model"]["path"], result.config["data"]["train"]):
        yield f"{TOY_WARNING % result.model}."
    elif result.config["data"]["train"] is None:
        yield "It was trained on a synthetic world of short texts and is no judge of other texts."
    if metrics.over_length.low is not None and metrics.over_length.low <= 0:
        yield f"It is not shown to be better than counting characters: {metrics.over_length} in accuracy."
    if metrics.ece.low is not None and metrics.ece.low > metrics.ece_noise_floor:
        yield "Its probabilities are miscalibrated beyond what as many pairs of a perfect model would show."
    for column, groups in metrics.groups.items():
        large = {name: group for name, group in groups.items() if group.num_pairs >= LEAST_PAIRS}
        if len(large) > 1:
            name, worst = min(large.items(), key=lambda item: item[1].accuracy.value)
            accuracy = str(worst.accuracy)
            yield f"Lowest accuracy of {len(large)} by {column}: {name}, {accuracy} on {worst.num_pairs} pairs."
    data = result.data
    for split, cut in data.truncation.items():
        if cut["num_prompt_cut"] or cut["num_response_cut"]:
            yield (
                f"Of {cut['num_pairs']} {split} pairs, {cut['num_prompt_cut']} lost tokens of the prompt and "
                f"{cut['num_response_cut']} of a response at {cut['max_length']} tokens."
            )
    if data.skipped_rows:
        yield f"{data.skipped_rows} rows of the data gave no pair."
    yield from data.notes


def _diagnosed(run_dir: Path) -> Iterator[str]:
    """Sentences on the checks that failed or warned in the diagnosis of the run's folder."""
    try:
        checks = json.loads((run_dir / DOCTOR_FILE).read_text(encoding="utf-8"))["checks"]
        states = [check["status"] for check in checks]
        found = [check for check in checks if check["status"] in ("fail", "warn")]
        told = [f"`rm-opt doctor`, {check['status']}, {check['name']}: {check['explanation']}" for check in found]
    except (OSError, ValueError, TypeError, KeyError):
        yield "`rm-opt doctor` has not examined this model."
        return
    yield from told or [f"`rm-opt doctor` found nothing wrong in {states.count('ok')} checks."]


def _training(run_dir: Path, result: RunResult) -> str:
    config, data, identity = result.config, result.data, RunFolder(run_dir).identity
    unnamed = "pairs in memory" if identity is not None and not identity.sources else "the synthetic world"
    optimizer = config["optimizer"]
    rows = {
        "pairs": f"{data.train_pairs} ({', '.join(_data_names(config['data']['train'])) or unnamed})",
        "optimizer": f"{result.optimizer}, learning rate {optimizer['lr']:g}, schedule {config['schedule']['name']}",
        "batch": f"{config['batching']['batch_size']} pairs",
        "steps": f"{result.steps}; exported: step {result.best_step}, best {result.monitor}; {result.ending}",
        "adapter": config["adapter"]["kind"],
        "trainable parameters": str(result.parameters),
        "precision": config["hardware"]["precision"],
        "seed": str(result.seed),
        "fingerprints of the pairs": f"{data.train_fingerprint} (training), {data.val_fingerprint} (validation)",
        "versions": ", ".join(f"{name} {version}" for name, version in result.versions.items()),
    }
    return markdown_table(("", ""), rows.items())


def _validation(result: RunResult) -> str:
    return ", ".join(_data_names(result.config["data"]["val"])) or result.data.val_origin


def _is_hub_name(source: Any) -> bool:
    return isinstance(source, str) and bool(_HUB_ID.fullmatch(source)) and not Path(source).exists()


def _data_names(sources: Any) -> list[str]:
    return [_named(path) for path in paths_of(sources)]


def _named(path: str) -> str:
    """A hub name unchanged, or the last part of a path, since a whole path may reveal something of the machine."""
    return path if _is_hub_name(path) else Path(path).name
