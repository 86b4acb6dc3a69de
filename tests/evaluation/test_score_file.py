"""Files are scored in bounded memory, and a killed scoring continues to the same bytes."""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
import re
import signal
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from rm_optimizer.errors import CheckpointError, ConfigError, DataError
from rm_optimizer.evaluation.response_files import file_kind, read_prompts, read_responses
from rm_optimizer.evaluation.score_file import score_file
from rm_optimizer.interfaces.cli import app
from tests.builders import decoder_tokenizer, tiny_model


class LengthScorer:
    """Reward is the response's length less a tenth of the prompt's; may be told to die."""

    def __init__(self, die_at_call: int | None = None) -> None:
        self.calls: list[int] = []
        self.die_at_call = die_at_call

    def score(self, prompts, responses):
        if self.die_at_call is not None and len(self.calls) + 1 == self.die_at_call:
            raise RuntimeError("killed")
        self.calls.append(len(responses))
        rewards = [len(response) - len(prompt) / 10 for prompt, response in zip(prompts, responses, strict=True)]
        return torch.tensor(rewards)


ROWS = [{"prompt": f"question {i}", "response": "é" * (1 + i % 7), "id": i} for i in range(23)]


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write(path: Path, rows: list[dict]) -> Path:
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as text:
            writer = csv.DictWriter(text, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    else:
        write_jsonl(path, rows)
    return path


def rewards_in(path: Path) -> list:
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as text:
            return [float(row["reward"]) for row in csv.DictReader(text)]
    if path.suffix == ".parquet":
        return pq.read_table(path)["reward"].to_pylist()
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line)["reward"] for line in data.splitlines()]


EXPECTED = LengthScorer().score([row["prompt"] for row in ROWS], [row["response"] for row in ROWS]).tolist()


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".csv", ".parquet"])
@pytest.mark.parametrize("target_suffix", ["same", ".jsonl"])
def test_every_format_gets_a_reward_column_and_keeps_its_own(tmp_path, suffix, target_suffix):
    source = write(tmp_path / f"in{suffix}", ROWS)
    target = tmp_path / f"out{suffix if target_suffix == 'same' else target_suffix}"
    assert score_file(LengthScorer(), source, target, scorer_name="length", chunk_rows=4).num_rows == len(ROWS)
    assert rewards_in(target) == EXPECTED
    back = [row.prompt for row in read_responses(source)]
    assert back == [row["prompt"] for row in ROWS]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({source.name, target.name})


def test_parquet_keeps_column_types(tmp_path):
    table = pa.table({"prompt": ["p"], "response": ["r"], "when": pa.array([0], pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "in.parquet")
    score_file(LengthScorer(), tmp_path / "in.parquet", tmp_path / "out.parquet", scorer_name="length")
    assert pq.read_schema(tmp_path / "out.parquet").equals(table.schema.append(pa.field("reward", pa.float32())))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_list_of_responses_gets_a_list_of_rewards(tmp_path, suffix):
    source = write(tmp_path / f"in{suffix}", [{"prompt": "ab", "responses": ["x", "yy", "zzz"]}])
    score_file(LengthScorer(), source, tmp_path / f"out{suffix}", scorer_name="length")
    (rewards,) = rewards_in(tmp_path / f"out{suffix}")
    assert rewards == pytest.approx([0.8, 1.8, 2.8])


def test_messages_are_prompts(tmp_path):
    source = write_jsonl(
        tmp_path / "in.jsonl", [{"prompt": [{"role": "user", "content": "hi"}] * 3, "response": "four"}]
    )
    score_file(LengthScorer(), source, tmp_path / "out.jsonl", scorer_name="length")
    assert rewards_in(tmp_path / "out.jsonl") == pytest.approx([4 - 0.3])


def test_both_sides_of_pairs_are_scored_by_the_layout_that_the_error_names(tmp_path):
    source = write(tmp_path / "in.csv", [{"": 0, "prompt": "ab", "chosen": "x", "rejected": "yy"}])
    with pytest.raises(DataError, match=r"\{columns: \{responses: \[chosen, rejected\]\}\}; got '', prompt, chosen"):
        score_file(LengthScorer(), source, tmp_path / "out.jsonl", scorer_name="length")
    layout = {"columns": {"responses": ["chosen", "rejected"]}}
    score_file(LengthScorer(), source, tmp_path / "out.jsonl", scorer_name="length", layout=layout)
    assert rewards_in(tmp_path / "out.jsonl") == [pytest.approx([0.8, 1.8])]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_layout_names_the_columns_and_what_is_parsed(tmp_path, suffix):
    turns = str([{"role": "user", "content": "hi"}] * 3)
    source = write(tmp_path / f"in{suffix}", [{"question": turns, "texts": "['four', 'x']"}])
    columns, target = {"prompt": "question", "responses": "texts"}, tmp_path / f"out{suffix}"

    def scored(layout: object) -> list:
        target.unlink(missing_ok=True)
        score_file(LengthScorer(), source, target, scorer_name="length", layout=layout)
        return [json.loads(row) if isinstance(row, str) else row for row in rewards_in(target)]

    with pytest.raises(DataError, match=r"in question, texts spells .*parse: \[question, texts\]\}'$"):
        scored({"columns": columns})
    if suffix == ".parquet":
        assert scored({"columns": columns, "parse": ["question", "texts"]}) == [pytest.approx([3.7, 0.7])]
        columns = {"prompt": "question", "response": "texts"}
        assert scored({"columns": columns, "parse": []}) == [pytest.approx(13 - len(turns) / 10)]
    for wrong in ({"columns": columns, "winner": "a,b"}, "intel-orca"):
        with pytest.raises(ConfigError, match=r"keys columns, parse and encoding, got (winner|has)"):
            scored(wrong)
    with pytest.raises(DataError, match="needs the columns none"):
        scored({"columns": columns, "parse": ["none"]})


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize("torn", [b"", b"1.23"])
def test_a_stopped_call_continues_to_the_same_bytes(tmp_path, suffix, torn):
    source = write(tmp_path / f"in{suffix}", ROWS)
    whole, resumed = tmp_path / f"whole{suffix}", tmp_path / f"resumed{suffix}"
    score_file(LengthScorer(), source, whole, scorer_name="length", chunk_rows=4)
    with pytest.raises(RuntimeError, match="killed"):
        score_file(LengthScorer(die_at_call=4), source, resumed, scorer_name="length", chunk_rows=4)
    assert not resumed.exists()
    with (tmp_path / f"resumed{suffix}.partial").open("ab") as log:
        log.write(torn)
    scorer, seen = LengthScorer(), []
    score_file(scorer, source, resumed, scorer_name="length", chunk_rows=4, on_progress=seen.append)
    assert seen == [12, 16, 20, 23]
    assert scorer.calls == [4, 4, 3]
    assert resumed.read_bytes() == whole.read_bytes()


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_score_file import LengthScorer
from rm_optimizer.evaluation.score_file import score_file
def stop(rows):
    if rows >= 12:
        os.kill(os.getpid(), signal.SIGKILL)
score_file(LengthScorer(), Path("in.jsonl"), Path("out.jsonl"), scorer_name="length", chunk_rows=4, on_progress=stop)
"""


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL is POSIX")
def test_rows_scored_before_kill_9_are_kept(python, tmp_path):
    write_jsonl(tmp_path / "in.jsonl", ROWS)
    script = KILLED.format(tests=str(Path(__file__).parent))
    done = subprocess.run([python, "-c", script], cwd=tmp_path, check=False)
    assert done.returncode == -signal.SIGKILL
    scorer = LengthScorer()
    score_file(scorer, tmp_path / "in.jsonl", tmp_path / "out.jsonl", scorer_name="length", chunk_rows=4)
    assert sum(scorer.calls) == len(ROWS) - 12
    assert rewards_in(tmp_path / "out.jsonl") == EXPECTED


def test_rewards_of_another_model_are_not_continued(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    with pytest.raises(RuntimeError):
        score_file(LengthScorer(die_at_call=2), source, tmp_path / "out.jsonl", scorer_name="a", chunk_rows=4)
    with pytest.raises(DataError, match=r"out\.jsonl\.partial: holds scores of another input, layout, model"):
        score_file(LengthScorer(), source, tmp_path / "out.jsonl", scorer_name="b", chunk_rows=4)


def test_rewards_by_another_reading_are_not_continued(tmp_path, monkeypatch):
    source, target = write_jsonl(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    stopped(source, target)
    with pytest.raises(DataError, match="another input, layout"):
        score_file(LengthScorer(), source, target, scorer_name="length", chunk_rows=4, layout={"parse": []})
    with monkeypatch.context() as changed:
        changed.setattr("rm_optimizer.evaluation.score_file._READING", 1)
        with pytest.raises(DataError, match="chunk size or version; remove it"):
            score_file(LengthScorer(), source, target, scorer_name="length", chunk_rows=4)
    score_file(LengthScorer(), source, target, scorer_name="length", chunk_rows=4)
    assert rewards_in(target) == EXPECTED


def stopped(source: Path, target: Path, name: str = "length") -> None:
    with pytest.raises(RuntimeError):
        score_file(LengthScorer(die_at_call=3), source, target, scorer_name=name, chunk_rows=4)


def test_rewards_of_other_content_under_the_same_name_are_not_continued(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    stopped(source, tmp_path / "out.jsonl")
    before = source.stat()
    write_jsonl(source, [{**row, "response": row["response"][::-1] + "x"[: i == 3]} for i, row in enumerate(ROWS)])
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DataError, match="scores of another input"):
        score_file(LengthScorer(), source, tmp_path / "out.jsonl", scorer_name="length", chunk_rows=4)


def test_the_same_content_is_continued_wherever_it_was_moved(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    stopped(source, tmp_path / "out.jsonl")
    moved = source.rename(tmp_path / "moved.jsonl")
    scorer = LengthScorer()
    score_file(scorer, moved, tmp_path / "out.jsonl", scorer_name="length", chunk_rows=4)
    assert sum(scorer.calls) == len(ROWS) - 8


def test_two_processes_never_write_one_file(tmp_path):
    source, sentences = write_jsonl(tmp_path / "in.jsonl", ROWS), []

    def second(rows: int) -> None:
        if rows == 8:
            with pytest.raises(DataError) as caught:
                score_file(LengthScorer(), source, tmp_path / "out.jsonl", scorer_name="length", chunk_rows=4)
            sentences.append(str(caught.value))

    score_file(LengthScorer(), source, tmp_path / "out.jsonl", scorer_name="length", chunk_rows=4, on_progress=second)
    assert sentences == [f"{tmp_path}/out.jsonl.partial: another process is writing it; wait until it has ended"]
    assert rewards_in(tmp_path / "out.jsonl") == EXPECTED


def test_an_input_that_changes_while_it_is_scored_is_refused(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)

    def change(rows: int) -> None:
        if rows == 8:
            source.write_text(source.read_text() + " \n")

    with pytest.raises(DataError, match="was changed while it was scored"):
        score_file(
            LengthScorer(), source, tmp_path / "out.jsonl", scorer_name="length", chunk_rows=4, on_progress=change
        )
    assert not (tmp_path / "out.jsonl").exists()


def test_no_call_of_the_scorer_gets_more_than_a_chunk(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    scorer = LengthScorer()
    score_file(scorer, source, tmp_path / "out.jsonl", scorer_name="length", chunk_rows=5)
    assert max(scorer.calls) == 5


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", '{"prompt": "p"}\n', r"a\.jsonl, line 1: expected the columns prompt and response.*got prompt$"),
        ("a.jsonl", '{"prompt": "p", "response": "r"}\n\n{"prompt": \n', r"a\.jsonl, line 3: not a valid JSON object"),
        ("a.jsonl", "[1]\n", r"a\.jsonl, line 1: expected one JSON object a line"),
        ("a.jsonl", '{"prompt": "", "response": "r"}\n', r"line 1: prompt must be non-empty text.*got ''"),
        ("a.jsonl", '{"prompt": "p", "response": 3}\n', r"line 1: response must be text, or messages .*, got 3"),
        (
            "a.jsonl",
            '{"prompt": "p", "responses": []}\n',
            r"line 1: responses must be a list of texts, or messages .*, got \[\]",
        ),
        ("a.jsonl", '{"prompt": "p", "response": " "}\n', r"line 1: response must not be empty; repair it"),
        ("a.jsonl", '{"prompt": "p", "responses": ["r", ""]}\n', r"line 1: response must not be empty; repair it"),
        ("a.jsonl", '{"prompt": "p", "response": "r", "reward": 1}\n', r"line 1: there is a column 'reward' already"),
        ("a.jsonl", "", r"a\.jsonl: the file is empty"),
        ("a.csv", "prompt,response\n", r"a\.csv: there are no rows to score"),
        ("a.csv", "prompt,response\np\n", r"a\.csv, line 2: has 1 fields where the header has 2"),
        ("a.csv", "question,response\np,r\n", r"a\.csv, line 2: expected the columns.*got question, response"),
        ("a.parquet", "no", r"a\.parquet: the file cannot be read"),
        ("a.txt", "x", r"a\.txt: expected a file name ending in \.jsonl"),
    ],
)
def test_an_unusable_file_gives_one_sentence(tmp_path, name, content, sentence):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=sentence) as caught:
        score_file(LengthScorer(), tmp_path / name, tmp_path / "out.jsonl", scorer_name="length")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_a_bad_row_is_found_before_anything_is_scored(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [*ROWS, {"prompt": "p"}])
    scorer = LengthScorer()
    with pytest.raises(DataError, match="line 24"):
        score_file(scorer, source, tmp_path / "out.jsonl", scorer_name="length", chunk_rows=4)
    assert scorer.calls == []


def test_rewards_that_are_not_finite_are_counted_and_the_first_is_named(tmp_path):
    class Broken:
        def score(self, prompts, responses):
            return torch.tensor(
                [float(i) if i < 2 else math.inf if i == 3 else math.nan for i in range(len(responses))]
            )

    source = write_jsonl(tmp_path / "in.jsonl", ROWS[:5])
    with pytest.raises(
        CheckpointError, match=r"3 of 5 rewards are not finite, the first is nan for .*in\.jsonl, line 3"
    ):
        score_file(Broken(), source, tmp_path / "out.jsonl", scorer_name="broken")
    assert not (tmp_path / "out.jsonl").exists()
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_score_and_evaluate_refuse_a_model_with_nan_in_its_weights(tmp_path, monkeypatch):
    model = tiny_model("llama")
    with torch.no_grad():
        model.score.weight[0, 0] = math.nan
    model.save_pretrained(tmp_path / "model")
    decoder_tokenizer(chat_template="{% for m in messages %}{{ m['content'] }}</s>{% endfor %}").save_pretrained(
        tmp_path / "model"
    )
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    write_jsonl(tmp_path / "pairs.jsonl", [pair])
    monkeypatch.chdir(tmp_path)
    for command in (("score", "--prompt", "a", "--response", "b"), ("evaluate", "--data", "pairs.jsonl")):
        result = CliRunner().invoke(app, [command[0], "model", *command[1:]])
        assert result.exit_code != 0
        assert "rewards are not finite, the first is nan for" in f"{result.exception} {result.stderr}"
        assert "nan" not in result.stdout
    assert not list(tmp_path.rglob("*rewards.jsonl"))


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("in.jsonl", "is there already"),
        ("out.csv", r"expected the format of in\.jsonl, or \.jsonl"),
        ("nowhere/out.jsonl", "its folder does not exist"),
    ],
)
def test_an_unusable_output_is_refused_before_scoring(tmp_path, target, sentence):
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    with pytest.raises(DataError, match=sentence):
        score_file(LengthScorer(), source, tmp_path / target, scorer_name="length")


def test_a_missing_input_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nope\.csv: no such file"):
        score_file(LengthScorer(), tmp_path / "nope.csv", tmp_path / "out.csv", scorer_name="length")


def test_only_jsonl_may_be_zipped():
    with pytest.raises(DataError):
        file_kind(Path("a.csv.gz"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # options that Ray Data itself sets
def test_any_number_of_workers_on_two_ray_nodes_writes_the_same_bytes_and_continues_a_stopped_call(
    tmp_path, monkeypatch
):
    import ray
    from ray.cluster_utils import Cluster

    write(tmp_path / "in.parquet", ROWS)
    write(tmp_path / "bad.jsonl", [*ROWS[:5], {"prompt": "nan", "response": "x"}])
    outputs = []
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        monkeypatch.chdir(tmp_path)  # the nodes are in another folder
        for workers in (None, 1, 2):
            target = Path(f"out-{workers}.parquet")
            with pytest.raises(RuntimeError, match="killed"):
                score_file(LengthScorer(4), "in.parquet", target, scorer_name="length", chunk_rows=2)
            score_file(LengthScorer(), "in.parquet", target, scorer_name="length", chunk_rows=2, num_workers=workers)
            outputs.append(target.read_bytes())
        with pytest.raises(CheckpointError, match=r"bad.jsonl, line 6"):
            score_file(NanScorer(), "bad.jsonl", "bad-out.jsonl", scorer_name="nan", chunk_rows=2, num_workers=2)
        with pytest.raises(ConfigError, match="must be at most 2, the cores that Ray has, got 3"):
            score_file(LengthScorer(), "in.parquet", "out.parquet", scorer_name="length", num_workers=3)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert outputs[0] == outputs[1] == outputs[2]


class NanScorer(LengthScorer):
    """No finite reward for the prompt `nan`."""

    def score(self, prompts, responses):
        return torch.where(torch.tensor([prompt == "nan" for prompt in prompts]), torch.nan, 1.0)


def test_single_texts_that_spell_messages_are_told_once_and_lists_of_texts_are_refused(tmp_path: Path, caplog):
    turns, source = '[{"role": "user", "content": "Hi"}]', tmp_path / "in.csv"
    for names in ({"prompt": "p", "response": "r"}, {"prompt": "prompt", "response": "response"}):
        layout = {"columns": names} if "p" in names.values() else None
        write(source, [{names["prompt"]: text, names["response"]: text} for text in (turns, "a", "b")])
        score_file(LengthScorer(), source, tmp_path / f"{names['prompt']}.csv", scorer_name="length", layout=layout)
        for name in ("prompt", "response"):
            assert caplog.text.count(f"1 of 3 cells of {name} look like messages and are read as text") == 1
        caplog.clear()
        write(source, [{names["prompt"]: '["a", "b"]', names["response"]: "x"}])
        told = f"read the first turn with a layout such as {{columns: {{prompt: {names['prompt']}.0"
        with pytest.raises(DataError, match=re.escape(told)):
            score_file(LengthScorer(), source, tmp_path / "refused.csv", scorer_name="length", layout=layout)
    score_file(LengthScorer(), source, tmp_path / "b.csv", scorer_name="l", layout={"columns": {"prompt": "prompt.0"}})
    assert rewards_in(tmp_path / "b.csv") == [pytest.approx(1 - 0.1)]


def test_text_that_spells_messages_is_told_where_no_layout_can_be_given(tmp_path: Path, caplog):
    for name, prompts, told in (
        ("spelled", '[{"role": "user", "content": "Hi"}]', True),
        ("turns", '["Hi", "Ho"]', True),
        ("plain", "[1, 2]", False),
    ):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps({"prompt": prompts, "response": "Hello."}) + "\n")
        caplog.clear()
        assert list(read_prompts(path)) == [row.prompt for row in read_responses(path)] == [prompts]
        assert caplog.text.count("the text in prompt spells lists or messages and is read as text") == 2 * told
