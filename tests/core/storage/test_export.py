"""An export scores in plain `transformers` as the model does in memory, says so, and is written whole or not at all."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import Message
from rm_optimizer.core.storage import export
from rm_optimizer.core.storage.certificate import DEFAULT_PROBE, ParityCertificate, ProbeScore, certify
from rm_optimizer.core.tokens.written_template import add_nothing_to_texts
from rm_optimizer.errors import CheckpointError
from tests.builders import (
    DECODERS,
    ENCODERS,
    FAMILIES,
    decoder_tokenizer,
    fresh_reward_model,
    stored_certificate,
    tiny_reward_model,
)

reward_model = partial(tiny_reward_model, max_length=96)
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{# {{ strftime_now('%d %b %Y') }} #}"
)


# transformers' DeBERTa calls torch.jit.script when it is imported.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])
def test_plain_transformers_scores_the_export_as_the_model_does(family: str, tmp_path: Path):
    model = reward_model(family)
    certificate = model.save_pretrained(tmp_path / "export")
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "export").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert type(plain).__module__.startswith("transformers.")
    prompts, responses = zip(*DEFAULT_PROBE, strict=True)
    ids = [list(encoding.ids) for encoding in model.renderer.encode_batch(prompts, responses)]
    batch = tokenizer.pad({"input_ids": ids}, return_tensors="pt")
    with torch.no_grad():
        theirs = plain(**batch).logits[:, 0]
    ours = model.score(prompts, responses)
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
    assert {turn.role for turns in prompts if not isinstance(turns, str) for turn in turns} == {"user", "assistant"}
    assert len(certificate.scores) == len(DEFAULT_PROBE) >= 8
    assert [score.reward for score in certificate.scores] == ours.double().tolist()
    assert max(map(len, ids)) == 96
    assert ours.std() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_the_files_say_one_raw_reward(family: str, tmp_path: Path):
    model = reward_model(family)
    model.save_pretrained(tmp_path / "export", statistics={"mean": 0.25, "std": 1.5, "num_responses": 10})
    config = AutoConfig.from_pretrained(tmp_path / "export")
    assert (config.num_labels, config.problem_type, config.id2label) == (1, "regression", {0: "reward"})
    assert config.pad_token_id == model.tokenizer.pad_token_id
    assert (tmp_path / "export" / "model.safetensors").is_file()
    record = json.loads((tmp_path / "export" / "export.json").read_text())
    assert record["reward_statistics"] == {"mean": 0.25, "std": 1.5, "num_responses": 10}
    assert record["dtype"] == "float32"
    assert record["identity"] == model.identity()
    assert record["versions"]["torch"] == torch.__version__
    text = model.renderer.text("Hi", "Hello.")
    answer = pipeline("text-classification", model=str(tmp_path / "export"), device="cpu")(text)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "export").eval()
    with torch.no_grad():
        logit = plain(**AutoTokenizer.from_pretrained(tmp_path / "export")(text, return_tensors="pt")).logits.item()
    assert answer[0]["score"] == pytest.approx(logit, abs=1e-6), "a server that obeys problem_type applies no sigmoid"


def test_a_pinned_chat_template_is_exported_as_it_was_used(tmp_path: Path):
    tokenizer = decoder_tokenizer(chat_template=TEMPLATE.replace("{# ", "").replace(" #}", ""))
    model = reward_model("llama", tokenizer)
    model.save_pretrained(tmp_path / "export")
    plain = AutoTokenizer.from_pretrained(tmp_path / "export")
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    text = plain.apply_chat_template(turns, tokenize=False)
    assert "26 Jul 2024" in text
    assert text == model.renderer.text("Hi", "Hello.")
    loaded = BradleyTerryRM.from_pretrained(tmp_path / "export")
    assert loaded.renderer.identity() == model.renderer.identity()


def test_a_tokenizer_that_cannot_leave_texts_alone_is_stored_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def without_effect(tokenizer: Path, config: Path, input_names: list[str]) -> None:
        tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text())))

    def with_another_token(tokenizer: Path, config: Path, input_names: list[str]) -> None:
        add_nothing_to_texts(tokenizer, config, input_names)
        values = json.loads(tokenizer.read_text())
        token = {"id": 384, "content": "grün", "special": False, "normalized": False}
        values["added_tokens"].append(token | dict.fromkeys(("single_word", "lstrip", "rstrip"), False))
        tokenizer.write_text(json.dumps(values))

    model = fresh_reward_model("bert", max_length=96)
    model.tokenizer.save_pretrained(tmp_path / "before")
    for spoiled in (without_effect, with_another_token):
        caplog.clear()
        monkeypatch.setattr(export, "add_nothing_to_texts", spoiled)
        model.save_pretrained(tmp_path / "export")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (tmp_path / "export" / name).read_bytes() == (tmp_path / "before" / name).read_bytes()
        assert "tokenize it with add_special_tokens=False" in caplog.text


def test_the_certificate_stands_in_the_folder(tmp_path: Path):
    certificate = reward_model("llama").save_pretrained(tmp_path / "export")
    assert stored_certificate(tmp_path / "export") == certificate
    assert any(isinstance(score.prompt, tuple) for score in certificate.scores)


def test_a_probe_of_ones_own_is_used(tmp_path: Path):
    probe = [("Hi", "Hello."), ((Message("user", "a"), Message("assistant", "b"), Message("user", "c")), "d")]
    certificate = reward_model("llama").save_pretrained(tmp_path / "export", probe=probe)
    assert [(score.prompt, score.response) for score in certificate.scores] == probe


def test_a_half_precision_export_stays_within_its_stated_tolerance(tmp_path: Path):
    model = reward_model("llama")
    model.bfloat16()
    certificate = model.save_pretrained(tmp_path / "export")
    assert certificate.dtype == "bfloat16"
    assert 0 < certificate.relative_difference <= certificate.tolerance == 2.0**-4
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "export").dtype is torch.bfloat16
    model.model.base_model.norm.register_forward_hook(lambda module, args, output: 1.5 * output)
    with pytest.raises(CheckpointError, match="rounding to bfloat16 alone can do that: export it with float32 weights"):
        model.save_pretrained(tmp_path / "export")


def test_a_float64_model_is_exported_exactly(tmp_path: Path):
    certificate = reward_model("llama").double().save_pretrained(tmp_path / "export")
    assert certificate.dtype == "float64"
    assert certificate.relative_difference <= 1e-9


@pytest.mark.parametrize("reloaded", [1.0 + 2e-5, float("nan")])
def test_a_certificate_beyond_its_tolerance_or_not_finite_fails(reloaded: float):
    def compare(value: float) -> ParityCertificate:
        scores = ProbeScore("a", "b", (1,), 1.0, value), ProbeScore("c", "d", (2,), 500.0, 500.004)
        return certify(scores, tolerance=1e-5, dtype="float32", device="cpu")

    assert compare(1.0).is_passed
    assert compare(1.0).max_difference == pytest.approx(0.004)
    assert not compare(reloaded).is_passed


def test_a_model_that_does_not_reload_alike_is_refused_and_leaves_nothing(tmp_path: Path):
    model = reward_model("llama")
    model.model.base_model.norm.register_forward_hook(lambda module, args, output: 1.5 * output)
    with pytest.raises(CheckpointError, match=r"does not score as the model does.*nothing was written"):
        model.save_pretrained(tmp_path / "export")
    assert list(tmp_path.iterdir()) == []


def test_an_export_is_replaced_whole_and_a_failed_one_keeps_the_earlier(tmp_path: Path):
    model = reward_model("llama")
    model.save_pretrained(tmp_path / "best")
    (tmp_path / "best" / "stale.txt").write_text("from the earlier export")
    with torch.no_grad():
        model.reward_head.weight.mul_(2)
    second = model.save_pretrained(tmp_path / "best")
    assert stored_certificate(tmp_path / "best") == second
    assert not (tmp_path / "best" / "stale.txt").exists()
    with torch.no_grad():
        model.reward_head.weight.fill_(float("nan"))
    with pytest.raises(CheckpointError, match="rewards are not finite"):
        model.save_pretrained(tmp_path / "best")
    assert stored_certificate(tmp_path / "best") == second
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_other_peoples_folders_are_never_replaced(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("three years of work")
    with pytest.raises(CheckpointError, match="is not an export of ours"):
        reward_model("llama").save_pretrained(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "three years of work"


def test_a_place_that_cannot_be_written_gives_one_sentence(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="the model cannot be written to"):
        reward_model("llama").save_pretrained(tmp_path / "file" / "export")


@pytest.mark.skipif(os.getuid() == 0, reason="the superuser may write anywhere")
def test_a_read_only_folder_gives_one_sentence(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="the model cannot be written to"):
        reward_model("llama").save_pretrained(tmp_path / "export")
