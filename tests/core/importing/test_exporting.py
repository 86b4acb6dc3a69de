"""Exports in other types and with normalized rewards."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, constants
from typer.testing import CliRunner

from rm_optimizer import BradleyTerryRM, ConfigError, PreferencePair, export_reward_model
from rm_optimizer.interfaces.cli import app
from tests.builders import tiny_reward_model
from tests.core.classifier.test_adapters import adapted, lightning_checkpoint
from tests.core.importing.published import CONVERSATIONS

PAIRS = [PreferencePair(prompt, response, f"{response[:2]}?") for prompt, response in CONVERSATIONS]


def rewards(source: object) -> torch.Tensor:
    model = BradleyTerryRM.from_pretrained(source)
    prompts = [pair.prompt for pair in PAIRS]
    return torch.stack(
        [model.score(prompts, [getattr(pair, side) for pair in PAIRS]) for side in ("chosen", "rejected")]
    )


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_normalized_rewards_have_mean_zero_and_deviation_one(family: str, tmp_path: Path):
    tiny_reward_model(family).save_pretrained(tmp_path / "model")
    before = rewards(tmp_path / "model").double()
    made = export_reward_model(tmp_path / "model", tmp_path / "out", pairs=PAIRS, normalize=True)
    after = rewards(tmp_path / "out").double()
    assert made.mean == pytest.approx(float(before.mean()), rel=1e-5)
    assert made.deviation == pytest.approx(float(before.std()), rel=1e-5)
    torch.testing.assert_close(after, (before - before.mean()) / before.std(), rtol=1e-4, atol=1e-5)
    assert (made.num_pairs, made.turned) == (len(PAIRS), None)  # nothing was rounded
    assert (tmp_path / "out" / "modeling_reward.py").exists() == (family == "llama")


def test_a_half_type_counts_the_pairs_that_turn(tmp_path: Path):
    model = tiny_reward_model("llama")
    model.save_pretrained(tmp_path / "model")
    made = export_reward_model(tmp_path / "model", tmp_path / "out", dtype="bfloat16", pairs=PAIRS)
    half = BradleyTerryRM.from_pretrained(tmp_path / "out", dtype="bfloat16")
    prompts, exact = [pair.prompt for pair in PAIRS], rewards(tmp_path / "model")
    rounded = torch.stack(
        [half.score(prompts, [getattr(pair, side) for pair in PAIRS]) for side in ("chosen", "rejected")]
    )
    assert made.dtype == "bfloat16"
    assert made.turned is not None
    assert made.turned.num_turned == int(((exact[0] > exact[1]) != (rounded[0] > rounded[1])).sum())
    assert made.turned.largest_change == pytest.approx(float((rounded - exact).abs().max()), rel=1e-4)
    assert made.turned.largest_change > 0


def test_the_adapter_of_a_run_is_that_of_its_best_checkpoint(tmp_path: Path):
    model = adapted("llama", tmp_path / "base")
    model.save_pretrained(tmp_path / "run" / "best")
    (tmp_path / "run" / "checkpoints").mkdir()
    lightning_checkpoint(model, tmp_path / "run" / "checkpoints" / "best.ckpt")
    export_reward_model(tmp_path / "run", tmp_path / "out", adapter_only=True)
    assert (tmp_path / "out" / "adapter_config.json").is_file()
    torch.testing.assert_close(rewards(tmp_path / "out"), rewards(tmp_path / "run"), rtol=1e-5, atol=1e-5)


def test_normalizing_needs_pairs(tmp_path: Path):
    tiny_reward_model("llama").save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="--data"):
        export_reward_model(tmp_path / "model", tmp_path / "out", normalize=True)
    result = CliRunner().invoke(app, ["export", str(tmp_path / "model"), str(tmp_path / "out"), "--dtype", "bfloat16"])
    assert result.exit_code == 0, result.output
    assert "type of the weights: bfloat16" in result.output


class Hub(BaseHTTPRequestHandler):
    """A stand-in for the hub: the requests of a client that creates a repository and commits files to it."""

    files: dict[str, bytes]
    created: list[dict[str, object]]

    def _answer(self, payload: object, status: int = 200) -> None:
        body = json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.headers["Authorization"] != "Bearer hf_right":
            self._answer({"error": "Invalid credentials"}, 401)
        elif self.path == "/api/whoami-v2":
            self._answer({"name": "me", "type": "user", "auth": {}})
        else:
            assert self.path.startswith(("/api/models/me/judge/tree/main", "/api/models/me/judge/revision/main"))
            tree = [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in self.files]
            self._answer(tree if "/tree/" in self.path else {"id": "me/judge", "sha": "0" * 40, "siblings": []})

    def do_POST(self) -> None:
        length = self.headers["Content-Length"]
        content = self.rfile.read(int(length)) if length else b"".join(self._chunks())
        if self.path == "/api/repos/create":
            self.created.append(json.loads(content))
            self._answer({"url": f"http://{self.headers['Host']}/me/judge", "name": "me/judge", "id": "1"})
        elif self.path == "/api/validate-yaml":
            assert "reward-model" in json.loads(content)["content"]
            self._answer({"warnings": [], "errors": []})
        elif "/preupload/" in self.path:
            names = [each["path"] for each in json.loads(content)["files"]]
            files = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
            self._answer({"files": files})
        else:
            assert self.path.startswith("/api/models/me/judge/commit/main")
            for line in map(json.loads, content.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    del self.files[line["value"]["path"]]
            url = f"http://{self.headers['Host']}/me/judge/commit/{'1' * 40}"
            self._answer({"success": True, "commitOid": "1" * 40, "commitUrl": url, "hookOutput": ""})

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()

    def log_message(self, *arguments: object) -> None:
        """Nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    class Mine(Hub):
        files, created = {"pytorch_model.bin": b"an earlier model", "LICENSE": b"mine"}, []

    server = ThreadingHTTPServer(("127.0.0.1", 0), Mine)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    yield Mine
    server.shutdown()
    server.server_close()


def test_a_push_uploads_the_certified_folder_with_its_card(hub: type[Hub], tmp_path: Path):
    tiny_reward_model("llama").save_pretrained(tmp_path / "model")
    command = ["export", str(tmp_path / "model"), str(tmp_path / "out"), "--push", "me/judge"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert f"uploaded: {constants.ENDPOINT}/me/judge" in result.output
    assert hub.created[0]["name"] == "judge"
    assert hub.created[0].get("private", hub.created[0].get("visibility")) in (True, "private")
    written = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert hub.files == written | {"LICENSE": b"mine"}, "files of the earlier model are gone, others stay"
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.pipeline_tag == "text-classification"
    assert "| type of the weights | float32 |" in card.text
    assert str(tmp_path) not in card.content


def test_an_export_keeps_the_card_of_its_source(tmp_path: Path):
    tiny_reward_model("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text("---\ntags: [mine]\n---\n\n# Mine\n\n## How to use\n\nOld.\n")
    export_reward_model(tmp_path / "model", tmp_path / "half", dtype="bfloat16")
    export_reward_model(tmp_path / "half", tmp_path / "again")
    card = (tmp_path / "again" / "README.md").read_text()
    assert card.startswith("---\ntags: [mine]\n---\n\n# Mine\n\n## This export\n\n")
    assert (card.count("## This export"), card.count("## How to use"), "Old." in card) == (1, 1, False)


@pytest.mark.parametrize(
    ("repository", "token", "message"),
    [
        ("me/judge", "", "no token to write me/judge with; set HF_TOKEN"),
        ("me/judge", "hf_wrong", r"refuses to write me/judge: 401 .*; set HF_TOKEN to a token that may write there"),
        ("me/judge/1", "hf_right", "--push expects a hub id such as owner/name, got 'me/judge/1'"),
        ("me/judge", "unreachable", r"the hub at http://127.0.0.1:9 cannot be reached to write me/judge"),
    ],
)
def test_a_push_that_cannot_succeed_is_refused_first(
    hub: type[Hub], repository: str, token: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    if token == "unreachable":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=message):
        export_reward_model(tmp_path / "model", tmp_path / "out", push=repository)
    assert not (tmp_path / "out").exists()
