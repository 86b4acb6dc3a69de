"""Causes of differences between two scorings, on callers of plain transformers that `benchmarks/why.py` builds."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

from benchmarks.why import (
    LIMIT,
    Caller,
    Zoo,
    cases,
    half,
    other_head,
    other_merges,
    other_normalizer,
    other_tokens,
    pipeline_of,
    scores_file,
)
from rm_optimizer import BradleyTerryRM, ConfigError, DataError, Explanation, explain_difference
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.evaluation.score_file import score_file
from rm_optimizer.explanation.changes import changes
from rm_optimizer.explanation.findings import REMEDIES
from rm_optimizer.explanation.local_copy import LocalCopy
from rm_optimizer.explanation.probes import probes
from rm_optimizer.explanation.recipe import RecipeRenderer
from rm_optimizer.interfaces.cli import app

QUICK = {"chatml/pipeline", "chatml/system", "llama/doubled_bos", "llama/cut_right", "bert/head_bias"}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def models(zoo):
    """The model of each family, loaded once."""
    return {name: BradleyTerryRM.from_pretrained(folder, max_length=LIMIT) for name, folder in zoo.of.items()}


def kinds(found: Explanation) -> list[str]:
    return [cause.kind for cause in found.causes]


def case_of(zoo: Zoo, name: str):
    return next(case for group in cases(zoo) for case in group if case.name == name)


@pytest.mark.parametrize("name", sorted(QUICK))
def test_the_cause_of_one_mistake_is_named_first(zoo, models, name):
    case = case_of(zoo, name)
    found = explain_difference(models[name.partition("/")[0]], case.b())
    assert kinds(found)[0] == case.kinds[0]
    assert found.left < 1e-5 < found.largest
    assert found.remedy.startswith(REMEDIES[case.kinds[0]])
    assert str(found).count("Cause: ") == 1


@pytest.mark.slow
@pytest.mark.parametrize("group", [0, 1, 2], ids=["single", "pairs", "equal"])
def test_all_seeded_causes_are_named_and_equal_scorings_are_not_accused(zoo, group):
    wrong = {}
    for case in cases(zoo)[group]:
        found = explain_difference(case.a, case.b(), max_length=LIMIT)
        is_right = kinds(found)[:1] == [*case.kinds[:1]] if group == 0 else {*kinds(found)} == {*case.kinds}
        assert found.wall_seconds < 30
        if not is_right or found.agrees != (group == 2):
            wrong[case.name] = kinds(found)
    assert len(wrong) <= (2, 3, 0)[group], wrong


def test_two_causes_are_named_together(zoo, models):
    found = explain_difference(models["llama"], case_of(zoo, "llama/bos+right").b())
    assert set(kinds(found)) == {"bos", "truncation"}
    assert found.left < 1e-5


def test_a_cut_that_changes_long_answers_alone_is_one_cause(zoo, models):
    """Prompts without BOS lose the same tokens by both rules, so not all long conversations differ."""
    found = explain_difference(models["chatml"], Caller(zoo.of["chatml"], cut="left"))
    assert kinds(found) == ["truncation"]
    assert 0 < found.num_differing < 4


def test_equal_scorings_agree(zoo, models):
    found = explain_difference(models["bert"], Caller(zoo.of["bert"]))
    assert found.agrees
    assert found.cause == "agree"
    assert found.exit_code == 0
    assert "agree" in repr(found)
    assert not found.remedy


@pytest.mark.parametrize("family", ["chatml", "llama", "bert"])
def test_the_default_recipe_gives_the_ids_of_the_package(models, family):
    renderer = models[family].renderer
    rendering = RecipeRenderer(renderer)
    undated = replace(rendering.base, eos="unblanked" if family == "bert" else "", strip="none")
    for talk in probes(renderer):
        assert rendering.ids(talk, undated) == rendering.ids(talk, rendering.base) == renderer.encode(*talk).ids


@pytest.mark.parametrize(
    ("family", "change", "part"),
    [
        ("bert", other_normalizer, "normalizer"),
        ("llama", other_merges, "merges"),
        ("bert", other_tokens, "added tokens"),
    ],
)
def test_the_part_of_a_tokenizer_that_differs_is_exchanged_alone(zoo, models, family, change, part):
    tokenizer = AutoTokenizer.from_pretrained(zoo.of[family])
    change(None, tokenizer)
    tokenizer.chat_template = models[family].tokenizer.chat_template
    other = ConversationRenderer(tokenizer, LIMIT)
    rendering = RecipeRenderer(models[family].renderer, other)
    assert rendering.parts == (part,)
    rows = [rendering.ids(talk, replace(rendering.base, tokenizer=part)) for talk in probes(other)[:6]]
    assert rows == [other.encode(*talk).ids for talk in probes(other)[:6]]
    assert rows != [models[family].renderer.encode(*talk).ids for talk in probes(other)[:6]]


def test_weights_that_were_rounded_are_no_other_weights(zoo, models):
    other = BradleyTerryRM.from_pretrained(zoo.changed("llama", "llama_half", half), max_length=LIMIT)
    tried = [change.cause for change in changes(LocalCopy(models["llama"], other))]
    assert "weights rounded to bfloat16" in [cause.name for cause in tried]
    assert not {"weights", "head_weights"} & {cause.kind for cause in tried}


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_the_own_attention_kernel_is_no_change(models, family):
    tried = [change.cause.name for change in changes(LocalCopy(models[family], None)) if change.fields.get("attention")]
    assert tried == ["attention kernel eager"]


def test_a_cause_outside_the_list_is_unknown_and_the_excluded_ones_are_listed(models):
    cubed = lambda prompts, responses: (models["chatml"].score(prompts, responses).numpy() ** 3).tolist()  # noqa: E731
    found = explain_difference(models["chatml"], cubed)
    assert (found.cause, found.exit_code) == ("unknown", 4)
    assert "doubled EOS" in found.excluded
    assert "sigmoid" not in found.cause
    assert "rank correlation of the rewards is 1.000" in str(found)


def test_another_head_is_found_from_rewards_alone(zoo, models):
    folder = zoo.changed("chatml", "chatml_head", other_head)
    found = explain_difference(models["chatml"], Caller(folder))
    assert kinds(found) == ["head_weights"]
    assert found.left < 1e-4


def test_rewards_that_change_when_asked_again_are_no_difference_of_the_models(models):
    draw = np.random.default_rng(0)
    noisy = lambda prompts, responses: models["bert"].score(prompts, responses).numpy() + draw.random(len(prompts))  # noqa: E731
    found = explain_difference(models["bert"], noisy)
    assert kinds(found) == ["chance"]
    assert found.evidence == "the other side gives other rewards when it is asked again"


@pytest.mark.slow
def test_a_classifier_of_two_labels_is_compared_by_their_difference(zoo, tmp_path):
    config = AutoConfig.from_pretrained(zoo.of["bert"])
    config.num_labels, config.problem_type = 2, None
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(zoo.of["bert"]).save_pretrained(tmp_path)
    found = explain_difference(tmp_path, pipeline_of(tmp_path), max_length=LIMIT)
    assert found.cause == "sigmoid, or softmax of two labels"
    assert "by the difference of its labels" in found.a


@pytest.mark.slow
def test_a_system_prompt_that_is_not_listed_is_recognized(models, zoo):
    found = explain_difference(models["chatml"], Caller(zoo.of["chatml"], system="Answer in the form of a poem."))
    assert found.cause == "unknown"
    assert "so one side inserts one" in str(found)


def test_conversations_that_are_too_long_for_the_other_side_are_left_out(zoo, models):
    caller = Caller(zoo.of["bert"], after=lambda scores: -scores)

    def short(prompts, responses):
        if sum(map(len, responses)) + len(str(prompts)) > 600 * len(responses):
            raise RuntimeError("the size of tensor a must match the size of tensor b")
        return caller(prompts, responses)

    found = explain_difference(models["bert"], short)
    assert kinds(found) == ["label_order"]
    for each in (found, replace(found, causes=(), num_differing=0)):
        assert "The other side refused 2 conversations" in str(each)


def test_one_side_must_be_a_model(zoo):
    with pytest.raises(ConfigError, match="expected a model as A or B"):
        explain_difference(lambda prompts, responses: [0.0] * len(prompts), "http://127.0.0.1:9/classify")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "path", "cause"),
    [("llama", "/get_reward", "doubled BOS"), ("bert", "/predict", "truncation at 96 tokens")],
)
def test_a_server_of_rendered_texts_is_asked(family, path, cause, zoo, models):
    """OpenRLHF's form, with a second BOS, and that of text-embeddings-inference, which cuts texts on the right."""
    caller = Caller(zoo.of[family])

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            texts = asked["query"] if path == "/get_reward" else [text for (text,) in asked["inputs"]]
            part = slice(-LIMIT, None) if path == "/get_reward" else slice(LIMIT)
            rows = [list(caller.tokenizer(text)["input_ids"])[part] for text in texts]
            rewards = [float(caller.alone(row).detach()) for row in rows]
            if path == "/predict":
                assert asked["raw_scores"] is True, "the default is a sigmoid"
                answer, status = [[{"score": reward, "label": "LABEL_0"}] for reward in rewards], 200
                if len(texts) > 16:
                    answer, status = (
                        {"error": "batch size > maximum allowed batch size", "error_type": "Validation"},
                        413,
                    )
            else:
                answer, status = {"rewards": rewards}, 200
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = explain_difference(f"http://127.0.0.1:{server.server_port}{path}", models[family])
        server.shutdown()
    assert found.local == "B"
    assert found.cause.startswith(cause)


def test_files_of_scores_are_read_by_the_layout_that_scored_them(zoo, models, tmp_path):
    model, turns = models["chatml"], json.dumps([{"role": "user", "content": "Hi"}])
    for rows, layout in (
        ([{"prompt": turns, "response": text} for text in ("Hello.", "No.")], {"parse": ["prompt"]}),
        ([{"prompt": turns, "response": "Hello."}], {"parse": []}),
        ([{"question": "Hi", "a": "Hello.", "b": "No."}], {"columns": {"prompt": "question", "responses": ["a", "b"]}}),
    ):
        source, scored = tmp_path / "in.jsonl", tmp_path / "scored.jsonl"
        source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        scored.unlink(missing_ok=True)
        score_file(model, source, scored, scorer_name="chatml", layout=layout)
        found = explain_difference(model, scored, layout=layout)
        assert found.agrees
        assert found.num_probes == (1 if layout == {"parse": []} else 2)
        with pytest.raises(DataError, match=r"expected prompt|in prompt spells .*parse: \[prompt\]"):
            explain_difference(model, scored)
    options = ["--layout", "{columns: {prompt: question, responses: [a, b]}}", "--max-length", str(LIMIT)]
    assert CliRunner().invoke(app, ["why", str(zoo.of["chatml"]), str(scored), *options]).exit_code == 0
    scored.write_text(json.dumps({"prompt": "Hi", "responses": "ab", "reward": [0.5, 0.5]}))
    with pytest.raises(DataError, match=r"line 1: .*got responses that are str and no list"):
        explain_difference(model, scored)
    with pytest.raises(ConfigError, match="no encoding here, since rm-opt score writes UTF-8"):
        explain_difference(model, scored, layout={"encoding": "latin1"})
    with pytest.raises(ConfigError, match="layout needs a file"):
        explain_difference(model, model, layout={"parse": []})


def test_the_command_exits_with_0_or_4_and_writes_what_was_tried(zoo, tmp_path):
    same, shifted = (str(scores_file(zoo, zoo.of["bert"], lambda s, c=c: s + c)) for c in (0.0, 1.0))
    run = lambda *arguments: CliRunner().invoke(app, ["why", str(zoo.of["bert"]), *arguments])  # noqa: E731
    agreed, differing = run(same), run(shifted, "--json", str(tmp_path / "why.json"))
    assert (agreed.exit_code, differing.exit_code) == (0, 4)
    assert "constant shift +1" in differing.stdout
    stored = Explanation.from_json((tmp_path / "why.json").read_text())
    assert stored.cause.startswith("constant shift")
    assert len(stored.interventions) > 10
