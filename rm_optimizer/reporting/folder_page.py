"""Page of a folder with a run, several runs, a study or a suite."""

from __future__ import annotations

from pathlib import Path

from rm_optimizer.errors import ConfigError
from rm_optimizer.experiments.compared_runs import runs_inside
from rm_optimizer.experiments.study import PLAN_FILE, StudyPlan, compares_optimizers
from rm_optimizer.records.run_folder import SUITE_FILE, RunFolder
from rm_optimizer.reporting.document import Document
from rm_optimizer.reporting.run_page import run_document
from rm_optimizer.training.folder.model_card import card_sections, card_summary, card_title, finished_result

REPORT_FOLDER = "report"
"""Name of the page's folder, in the folder of the run or study."""


def write_page(folder: Path, output: Path | None = None) -> Path:
    """Write the page of a folder and return its path.

    The same folder gives the same bytes.

    Args:
        folder: folder of a run, of several runs such as a sweep's, of a study, or of models on a suite.
        output: folder to write into; None takes `report/` of the folder.

    Raises:
        ConfigError: if the folder holds a study without a page or without a result, or runs that cannot be compared.
        DataError: if the folder holds neither a study nor a finished run.
    """
    document = _document(folder) or run_document(folder)
    return document.write(output or folder / REPORT_FOLDER)


def folder_markdown(folder: Path) -> str:
    """The numbers of a folder as Markdown for a pull request.

    It raises the errors of `write_page`. For a run it is the card of its model, without the hub's metadata and without
    instructions for the model's use.
    """
    if (document := _document(folder)) is not None:
        return document.markdown()
    result = finished_result(folder)
    return f"# {card_title(result)}\n\n{card_summary(result)}\n\n{card_sections(folder, result)}\n"


def _document(folder: Path) -> Document | None:
    """Content of the page of a study, several runs or a suite.

    None for any other folder.

    Raises:
        ConfigError: if this kind of study has no page, or the runs cannot be compared.
    """
    if compares_optimizers(folder):
        from rm_optimizer.reporting.optimizer_comparison import comparison_document  # only pages of its kind need it

        return comparison_document(folder)
    if (folder / PLAN_FILE).is_file():
        StudyPlan.read(folder)  # raises if the plan is damaged
        raise ConfigError(
            f"{folder} holds a study without a page; there are pages of runs and of comparisons of optimizers; "
            f"rm-opt compare report {folder} reports on other studies"
        )
    if (folder / SUITE_FILE).is_file():
        from rm_optimizer.reporting.suite import read_result, suite_document  # imports torch

        if (result := read_result(folder / SUITE_FILE)) is not None:
            return suite_document([result], "Models on a suite")
    if not RunFolder(folder).is_used and len(runs_inside(folder)) > 1:
        from rm_optimizer.reporting.comparison import sweep_document  # imports torch

        return sweep_document(folder)
    return None
