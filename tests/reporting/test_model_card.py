"""The card of an exported model: the hub's metadata, numbers of the run alone, weaknesses that the doctor found."""

import json
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, metadata_load
from typer.testing import CliRunner

from rm_optimizer.core.importing.publishing import CARD_FILE
from rm_optimizer.errors import DataError
from rm_optimizer.interfaces.cli import app
from rm_optimizer.records.run_folder import DOCTOR_FILE
from rm_optimizer.reporting.folder_page import finished_result
from rm_optimizer.training.folder.model_card import write_card

CONSTANTS = {"95", "2"}
"""Numbers of the text itself: the intervals' share, and the 2 of log 2."""


def card_of(run: Path) -> str:
    return write_card(run, finished_result(run)).read_text(encoding="utf-8")


def test_the_metadata_is_the_hubs_and_holds_the_metrics_of_the_run(trained: Path):
    card_of(trained)
    results = ModelCard.load(trained / "best" / CARD_FILE).data.eval_results
    metrics = json.loads((trained / "run.json").read_text())["metrics"]
    assert {each.metric_type: each.metric_value for each in results} == {
        name: metrics[name]["value"] for name in ("accuracy", "nll", "brier", "ece")
    }
    assert {each.dataset_name for each in results} == {"val.jsonl"}
    metadata = metadata_load(trained / "best" / CARD_FILE)
    assert metadata["pipeline_tag"] == "text-classification"
    assert "reward-model" in metadata["tags"]
    assert "datasets" not in metadata, "a file of this machine is no data set of the hub"


def test_every_number_is_a_number_of_the_run(trained: Path):
    body = re.sub(r"```.*?```", "", card_of(trained).split("\n---\n", 1)[1], flags=re.DOTALL)
    recorded = (trained / "run.json").read_text()
    values = [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", recorded)]
    printed = set(re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w.]*\w)", body)) - CONSTANTS
    assert len(printed) > 25
    for number in printed:
        places = len(number.partition(".")[2])
        assert number in recorded or any(f"{value:.{places}f}" == number for value in values), number


def test_no_path_of_the_machine_and_no_markup_of_the_data_gets_in(trained: Path):
    card = card_of(trained)
    assert "secret_place" not in card
    assert "<script>" not in card
    assert "code\\|math" in card
    assert "train.jsonl" in card


def test_cut_responses_and_a_model_that_reads_nothing_else_are_known_weaknesses(trained: Path):
    weaknesses = card_of(trained).partition("## Known weaknesses")[2].partition("## Training")[0]
    assert "is a toy" in weaknesses
    assert re.search(r"Of 60 val pairs, \d+ lost tokens of the prompt and 20 of a response at 32 tokens", weaknesses)
    assert "`rm-opt doctor` has not examined this model" in weaknesses


def test_the_doctor_of_the_exported_model_adds_its_findings(trained: Path, tmp_path: Path):
    arguments = ["doctor", str(trained), "--data", str(trained.parent / "val.jsonl"), "--max-pairs", "8"]
    try:
        result = CliRunner().invoke(app, arguments)
        assert DOCTOR_FILE in result.stdout
        diagnosis = json.loads((trained / DOCTOR_FILE).read_text())
        found = [check for check in diagnosis["checks"] if check["status"] in ("warn", "fail")]
        card = (trained / "best" / CARD_FILE).read_text()
        assert found
        assert all(f"{check['name']}: " in card for check in found)
        (trained / DOCTOR_FILE).write_text("{")
        assert "has not examined" in card_of(trained), "a torn diagnosis is none"
    finally:
        (trained / DOCTOR_FILE).unlink(missing_ok=True)


def test_a_folder_without_a_finished_run_is_refused(tmp_path: Path, trained: Path):
    with pytest.raises(DataError, match=r"holds no run \(run.json is missing\)"):
        finished_result(tmp_path)
    (tmp_path / "run.json").write_text((trained / "run.json").read_text())
    with pytest.raises(DataError, match="holds no exported model"):
        write_card(tmp_path, finished_result(tmp_path))
