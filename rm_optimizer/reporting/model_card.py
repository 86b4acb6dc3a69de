"""The numbers of a run as Markdown for a pull request: its model's card without metadata and instructions."""

from __future__ import annotations

from pathlib import Path

from rm_optimizer.training.folder.model_card import card_sections, card_summary, card_title, finished_result


def markdown_report(run_dir: Path) -> str:
    """The card for a pull request, without the hub's metadata and without instructions for the model's use.

    Raises:
        DataError: if the folder holds no result of a run.
    """
    result = finished_result(run_dir)
    return f"# {card_title(result)}\n\n{card_summary(result)}\n\n{card_sections(run_dir, result)}\n"
