"""Imported models score as their projects' published rules do, in memory, in plain transformers and when refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig
from typer.testing import CliRunner

from rm_optimizer import BradleyTerryRM, CheckpointError, ConfigError, import_reward_model
from rm_optimizer.interfaces.cli import app
from rm_optimizer.serving import RewardClient
from tests.builders import decoder_tokenizer, tiny_model
from tests.core.importing.published import (
    CONVERSATIONS,
    MARKER,
    TEMPLATE,
    Published,
    at_last,
    biased,
    layered,
    linear,
    zoo,
)
from tests.core.tokens.test_written_template import plain_rewards
from tests.serving.running import serve_process

QUICK = (
    *("classifier with a head bias", "LLaMA-Factory adapter with value_head.bin", "Starling", "Beaver reward"),
    *("OpenRLHF value_head, normalized", "InternLM2", "GRM", "QRM", "NeMo RL, distributed checkpoint"),
    *("LLaMA-Factory adapter with new tokens", "FP8 with a factor for each block", "sharded .bin in bfloat16"),
    *("cross-encoder of two labels", "cross-encoder with token types"),
)
READ_AS_THEY_ARE = (
    *("plain classifier", "sharded .bin in bfloat16", "FP8 with a factor for each block"),
    *("cross-encoder", "cross-encoder with token types"),
)
NAMES = [each.name for each in zoo(Path())]


def published(name: str, work: Path) -> Published:
    return next(each for each in zoo(work) if each.name == name)


def as_messages(prompt: str, response: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


@torch.no_grad()
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_an_imported_model_scores_by_its_projects_rule(name: str, tmp_path: Path):
    form, source, folder = published(name, tmp_path), tmp_path / "source", tmp_path / "imported"
    reward = form.write(source)
    if name not in READ_AS_THEY_ARE:
        with pytest.raises(CheckpointError, match="rm-opt import"):
            BradleyTerryRM.from_pretrained(source)
    imported = import_reward_model(source, folder, **form.options)
    expected = torch.tensor([float(reward(as_messages(*each))) for each in CONVERSATIONS])
    expected -= 0 if imported.is_constant_kept else imported.constant
    prompts, responses = map(list, zip(*CONVERSATIONS, strict=True))
    model = BradleyTerryRM.from_pretrained(folder)
    torch.testing.assert_close(model.score(prompts, responses), expected, rtol=1e-5, atol=1e-5)
    assert (folder / "modeling_reward.py").exists() == form.needs_code
    turns = [(("user", prompt), ("assistant", response)) for prompt, response in CONVERSATIONS]
    trust = {"trust_remote_code": True} if form.needs_code else {}
    for way, rewards in plain_rewards(folder, turns, **trust).items():
        torch.testing.assert_close(torch.tensor(rewards), expected, rtol=1e-5, atol=1e-5, msg=way)


def test_a_folder_with_its_own_head_is_refused_by_classes_that_lack_it(tmp_path: Path):
    at_last("llama", "model.", biased, "v_head.summary")(tmp_path / "source")
    imported = import_reward_model(tmp_path / "source", tmp_path / "imported")
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "imported", trust_remote_code=False)
    again = BradleyTerryRM.from_pretrained(tmp_path / "imported")
    again.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        assert again.score("Hi", "Hello.") == BradleyTerryRM.from_pretrained(tmp_path / "again").score("Hi", "Hello.")
    record = json.loads((tmp_path / "imported" / "import.json").read_text())
    assert record["form"] == imported.form == "TRL's value head"
    assert record["head"] == ["v_head.summary.weight", "v_head.summary.bias"]
    assert record["constant"] == imported.constant != 0


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({}, {"logit": "0"}, "the head has 1 output; leave --logit out"),
        ({}, {"head": "scores"}, "did you mean 'score'"),
        ({"mean": 2.0, "std": 3.0}, {}, "a mean of 2 and a deviation of 3, and config.json does not tell"),
        ({"model_type": "gpt_neox"}, {}, "the stored weights are not of the configuration's backbone"),
        ({"model_type": "baichuan"}, {}, "its backbone baichuan has no classifier in transformers"),
    ],
)
def test_what_the_files_leave_open_is_asked(
    fields: dict[str, object], options: dict[str, str], message: str, tmp_path: Path
):
    at_last("llama", "model.", linear, "score", more=fields)(tmp_path / "source")
    with pytest.raises((CheckpointError, ConfigError), match=message):
        import_reward_model(tmp_path / "source", tmp_path / "imported", **options)
    assert [each.name for each in tmp_path.iterdir()] == ["source"]


def test_several_heads_and_layers_ask_for_their_options(tmp_path: Path):
    source = tmp_path / "source"
    at_last("llama", "model.", layered(24), "score")(source)
    with pytest.raises(ConfigError, match="--activation"):
        import_reward_model(source, tmp_path / "imported")
    assert import_reward_model(source, tmp_path / "tanh", activation="tanh").form.endswith("tanh between them")
    weights = load_file(source / "model.safetensors")
    save_file(weights | {"v_head.weight": torch.ones(1, 32)}, source / "model.safetensors")
    with pytest.raises(ConfigError, match="2 heads, score, v_head; name one with --head"):
        import_reward_model(source, tmp_path / "imported")
    assert import_reward_model(source, tmp_path / "chosen", head="v_head").head == ("v_head.weight",)
    save_file(weights | {"extra.scale": torch.ones(3)}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 stored tensors have no part .* such as extra\.scale"):
        import_reward_model(source, tmp_path / "imported", activation="relu")


def test_what_an_option_is_not_for_is_refused(tmp_path: Path):
    at_last("llama", "model.", layered(24), "v_head.summary")(tmp_path / "source")
    with pytest.raises(
        ConfigError, match="drop_constant is for a linear head, and this is TRL's value head of 2 layers"
    ):
        import_reward_model(tmp_path / "source", tmp_path / "imported", drop_constant=True)
    import_reward_model(tmp_path / "source", tmp_path / "imported")
    with pytest.raises(CheckpointError, match="was imported before"):
        import_reward_model(tmp_path / "imported", tmp_path / "again")


def test_weights_are_found_in_nested_files_and_unknown_types_are_refused(tmp_path: Path):
    source = tmp_path / "source"
    at_last("llama", "model.", linear, "score")(source)
    weights = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    other = {"optimizer": {"state": torch.ones(2)}, "epoch": 3}
    torch.save(other | {"state_dict": weights}, source / "last.pt")
    import_reward_model(source, tmp_path / "imported")
    torch.save(other | {"model": weights, "ema": weights}, source / "last.pt")
    with pytest.raises(CheckpointError, match=r"last\.pt holds model, ema; keep the one"):
        import_reward_model(source, tmp_path / "imported")
    name = "model.layers.0.mlp.up_proj.weight"
    torch.save(weights | {name: weights[name].to(torch.int8)}, source / "last.pt")
    with pytest.raises(CheckpointError, match=f"{name} is stored in int8, and config.json does not tell how"):
        import_reward_model(source, tmp_path / "imported")
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="stores weights quantized by gptq"):
        import_reward_model(source, tmp_path / "imported")


@torch.no_grad()
@pytest.mark.parametrize("kind", [{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, {"load_in_8bit": True}])
def test_weights_of_bitsandbytes_are_unpacked(kind: dict[str, object], tmp_path: Path):
    functional = pytest.importorskip("bitsandbytes").functional
    torch.manual_seed(0)
    tiny_model("llama").save_pretrained(tmp_path / "whole")
    options = {"quantization_config": BitsAndBytesConfig(**kind), "device_map": {"": "cpu"}}
    packed = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole", num_labels=1, **options)
    packed.save_pretrained(tmp_path / "packed")
    decoder_tokenizer(chat_template=TEMPLATE).save_pretrained(tmp_path / "packed")
    import_reward_model(tmp_path / "packed", tmp_path / "imported")
    found, weight = load_file(tmp_path / "imported" / "model.safetensors"), packed.model.layers[1].mlp.up_proj.weight
    if "load_in_4bit" in kind:
        expected = functional.dequantize_4bit(weight.data, weight.quant_state)
    else:
        expected = weight.data.float() * weight.SCB[:, None] / 127
    torch.testing.assert_close(found["model.layers.1.mlp.up_proj.weight"], expected.float(), rtol=1e-5, atol=1e-6)


def test_fp8_blocks_that_do_not_divide_a_matrix_have_the_size_of_the_configuration(tmp_path: Path):
    source, name = tmp_path / "source", "model.layers.0.mlp.up_proj.weight"
    described = {"quant_method": "fp8", "weight_block_size": [24, 20]}
    at_last("llama", "model.", linear, "score", more={"quantization_config": described})(source)
    weights = load_file(source / "model.safetensors")
    rows, columns = weights[name].shape
    factors = torch.rand(-(-rows // 24), -(-columns // 20)) + 0.5
    packed = weights[name].to(torch.float8_e4m3fn)
    save_file(weights | {name: packed, f"{name}_scale_inv": factors}, source / "model.safetensors")
    import_reward_model(source, tmp_path / "imported")
    expected = packed.float() * torch.kron(factors, torch.ones(24, 20))[:rows, :columns]
    assert torch.equal(load_file(tmp_path / "imported" / "model.safetensors")[name], expected)
    save_file(weights | {name: packed, f"{name}_scale_inv": factors[:1]}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match="does not fit weight_block_size"):
        import_reward_model(source, tmp_path / "other")


def test_a_gated_head_needs_its_marker(tmp_path: Path):
    published("ArmoRM", tmp_path).write(tmp_path / "source")
    with pytest.raises(ConfigError, match="--marker"):
        import_reward_model(tmp_path / "source", tmp_path / "imported")
    imported = import_reward_model(tmp_path / "source", tmp_path / "imported", marker=MARKER)
    assert "mixture of 5 objectives" in imported.form


def test_a_source_without_a_chat_template_asks_for_one(tmp_path: Path):
    at_last("llama", "model.", linear, "regression_head")(tmp_path / "source")
    (tmp_path / "source" / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="--template"):
        import_reward_model(tmp_path / "source", tmp_path / "imported")
    turn = "{{ 'Human' if m['role'] == 'user' else 'Assistant' }}: {{ m['content'] }}{{ '' if loop.last else '\n\n' }}"
    (tmp_path / "template.jinja").write_text("{% for m in messages %}" + turn + "{% endfor %}")
    options = {"template": tmp_path / "template.jinja", "append": "</s>"}
    import_reward_model(tmp_path / "source", tmp_path / "imported", **options)
    tokenizer = BradleyTerryRM.from_pretrained(tmp_path / "imported").tokenizer
    assert (
        tokenizer.apply_chat_template(as_messages("Hi", "Yes."), tokenize=False) == "Human: Hi\n\nAssistant: Yes.</s>"
    )


def test_a_conversation_that_ends_with_the_pad_token_is_refused_where_the_first_pad_decides(tmp_path: Path):
    published("DeepSpeed-Chat", tmp_path).write(tmp_path / "source")
    with pytest.raises(ConfigError, match="reads the token before the first pad"):
        import_reward_model(tmp_path / "source", tmp_path / "imported", append="<pad>")


CODE = """
from transformers import PreTrainedTokenizerFast


class MyTokenizer(PreTrainedTokenizerFast):
    def __init__(self, **options):
        super().__init__(**options)
        open({ran!r}, "a").close()
"""


@torch.no_grad()
def test_code_of_a_tokenizer_runs_only_when_it_is_trusted(tmp_path: Path):
    source, ran = tmp_path / "source", tmp_path / "ran"
    reward = at_last("llama", "model.", linear, "score")(source)
    (source / "tokenization_mine.py").write_text(CODE.format(ran=str(ran)))
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings |= {
        "auto_map": {"AutoTokenizer": [None, "tokenization_mine.MyTokenizer"]},
        "tokenizer_class": "MyTokenizer",
    }
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="is custom code; read it, then pass --trust-remote-code"):
        import_reward_model(source, tmp_path / "imported")
    assert not ran.exists()
    import_reward_model(source, tmp_path / "imported", trust_remote_code=True)
    ran.unlink()
    (prompt, response), *_ = CONVERSATIONS
    model = BradleyTerryRM.from_pretrained(tmp_path / "imported")
    assert float(model.score(prompt, response)) == pytest.approx(float(reward(as_messages(prompt, response))), abs=1e-5)
    assert not ran.exists()
    assert not [*(tmp_path / "imported").glob("*.py")]


@pytest.mark.slow
@torch.no_grad()
def test_a_value_head_is_imported_evaluated_compared_served_and_exported_in_five_commands(tmp_path: Path):
    source, imported, half = (str(tmp_path / name) for name in ("value-head-run", "imported", "half"))
    reward = published("LLaMA-Factory value_head.safetensors", tmp_path).write(tmp_path / "value-head-run")
    rows = [{"prompt": prompt, "chosen": response, "rejected": f"{response} No."} for prompt, response in CONVERSATIONS]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def ran(*arguments: str) -> str:
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        return result.output

    assert "read as TRL's value head" in ran("import", source, imported)
    pairs = ("--data", str(tmp_path / "pairs.jsonl"))
    report = ran("evaluate", imported, *pairs, "--output", str(tmp_path / "evaluation"))
    assert "accuracy" in report
    assert "agree: all" in ran("why", imported, source)
    with serve_process(Path(imported), "--check", source) as server, RewardClient(server.url, check=source) as client:
        served = client.score(*map(list, zip(*CONVERSATIONS, strict=True)))
    expected = torch.tensor([float(reward(as_messages(*each))) for each in CONVERSATIONS])
    torch.testing.assert_close(served, expected, rtol=1e-5, atol=1e-5)
    told = ran("export", imported, half, "--dtype", "bfloat16", *pairs)
    assert "type of the weights: bfloat16" in told
    rounded = BradleyTerryRM.from_pretrained(half, dtype="bfloat16")
    scores = rounded.score(*map(list, zip(*CONVERSATIONS, strict=True)))
    torch.testing.assert_close(scores, expected, rtol=0.05, atol=0.05)
