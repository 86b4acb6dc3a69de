from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rm_optimizer.core.data_loader import PreferenceDataset
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import Message, PreferencePair, as_messages
from rm_optimizer.core.pairs.synthetic import synthetic_world
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.core.tokens.tokenizer import tokenizer_of_pairs, train_tokenizer
from rm_optimizer.core.tokens.written_template import TemplateWriter
from rm_optimizer.errors import DataError
from rm_optimizer.schema import TrainConfig, compose, config_root, typed
from rm_optimizer.schema.data import SyntheticConfig
from tests.builders import byte_tokenizer
from tests.serving.test_agent_rows import ROWS

PRESETS = ["tiny", "minilm", "deberta", "modernbert", "qwen", "llama"]


def texts(seed=0):
    world = synthetic_world(SyntheticConfig(num_train=200, num_val=2, seed=seed))
    return [text for pair in world.train for text in (pair.prompt, pair.chosen, pair.rejected)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(texts(), 600)


def preset(name: str) -> TrainConfig:
    return typed(compose([f"model={name}", "output_dir=unused"]), TrainConfig)


def test_the_same_texts_give_the_same_vocabulary_and_merges(tokenizer):
    again = train_tokenizer(iter(texts()), 600)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_other_texts_give_another_vocabulary(tokenizer):
    other = train_tokenizer(["a reward model is a judge, not a policy"] * 3, 600)
    assert other.get_vocab() != tokenizer.get_vocab()


def test_the_vocabulary_has_the_size_asked_for_when_the_texts_allow_it(tokenizer):
    assert len(tokenizer) == 600
    assert len(train_tokenizer(["aa"], 600)) == 3 + 256 + 1  # special tokens, bytes and the one merge there is


def test_any_text_comes_back_between_one_bos_and_one_eos(tokenizer):
    text = " Grüße, 世界!\n\n🙂 \x00 "
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert ids[-1] == tokenizer.eos_token_id
    assert len({*ids} & {*tokenizer.all_special_ids}) == sum(i in tokenizer.all_special_ids for i in ids) == 2
    assert tokenizer.decode(ids[1:-1], clean_up_tokenization_spaces=False) == text


def test_bos_eos_and_pad_are_three_tokens_and_there_is_no_chat_template(tokenizer):
    special = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    assert special == ("<|bos|>", "<|eos|>", "<|pad|>")
    assert tokenizer.convert_tokens_to_ids(list(special)) == [0, 1, 2]
    assert tokenizer.chat_template is None


def test_a_saved_tokenizer_reads_alike(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert [again(text)["input_ids"] for text in texts()[:20]] == [
        tokenizer(text)["input_ids"] for text in texts()[:20]
    ]


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_composes_under_its_own_name_and_sets_the_learning_rate(name):
    config = preset(name)
    assert config.model.name == name
    assert config.optimizer.lr == config.model.adamw_lr
    assert (config.model.path is None) == (name == "tiny")


@pytest.mark.parametrize("name", PRESETS)
def test_each_tuned_number_of_a_preset_states_its_source(name):
    lines = (Path(config_root()) / "model" / f"{name}.yaml").read_text().splitlines()
    tuned = [line for line in lines if re.match(r"(max_length|adamw_lr):", line)]
    assert len(tuned) == 2
    assert all("#" in line for line in tuned)


def test_the_quickstart_trains_the_tiny_model_on_the_embedded_world():
    config = typed(compose(["experiment=quickstart", "output_dir=unused"]), TrainConfig)
    assert config.model.name == "tiny"
    assert config.data.train is None


def test_no_response_of_the_embedded_world_is_cut_by_the_tiny_model():
    model = preset("tiny").model
    tokenizer = train_tokenizer(texts(), model.vocab_size)
    rewarder = BradleyTerryRM.from_config(model.architecture, tokenizer, max_length=model.max_length, seed=0)
    world = synthetic_world(SyntheticConfig(num_train=400, num_val=2, seed=1))
    encodings = [rewarder.renderer.encode(p.prompt, r) for p in world.train for r in (p.chosen, p.rejected)]
    assert sum(encoding.prompt_cut + encoding.response_cut for encoding in encodings) == 0


def test_a_tokenizer_of_agents_rows_writes_every_field_and_one_of_plain_rows_has_no_template():
    plain = PreferencePair((Message("user", "Hi"),), "a", "b")
    assert tokenizer_of_pairs([plain], 300).chat_template is None
    data = PreferenceDataset([row for row in ROWS if "chat_template_kwargs" not in row])
    for pair in data:
        tokenizer = tokenizer_of_pairs([plain, pair], 300)
        TemplateWriter(tokenizer).write_for_training()
        renderer = ConversationRenderer(tokenizer, 4096)
        assert renderer.refusal(pair) is None
        assert renderer.text(pair.prompt, pair.chosen).startswith(renderer.prompt_text(pair.prompt)[:-11])


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if loop.last and message.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZED: dict[str, Callable[[str], str]] = {
    "input_ids_chosen": "input_ids_{}".format,
    "chosen_input_ids": "{}_input_ids".format,
    "chosen_ids": "{}_ids".format,
}
TALKS: dict[str, list[dict[str, str]]] = {
    "one turn": [{"role": "user", "content": "Why, in line\n3?"}],
    "a system turn": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}],
    "several turns": [
        {"role": role, "content": f"Text {place}."} for place, role in enumerate(["user", "assistant"] * 2 + ["user"])
    ],
}


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("tokenizer"))
    byte_tokenizer(CHATML).save_pretrained(folder)
    return folder


def tokenized(folder: str, name: str, prompt: list[dict[str, str]], stop: bool) -> dict[str, Any]:
    own, row = AutoTokenizer.from_pretrained(folder), dict[str, Any]()
    for side in ("chosen", "rejected"):
        ids = own.apply_chat_template([*prompt, {"role": "assistant", "content": side}], return_dict=False)
        row[TOKENIZED[name](side)] = [*ids, *[own.eos_token_id] * stop]
        row[f"attention_mask_{side}"] = [1] * len(ids)
    return row


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("name", TOKENIZED)
def test_token_ids_are_read_as_the_conversations_that_they_spell(name, stop, chat_folder, tmp_path):
    rows = [tokenized(chat_folder, name, prompt, stop) for prompt in TALKS.values()]
    path = tmp_path / "tokens.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for data in (rows, str(path)):
        found = PreferenceDataset(data, layout={"tokenizer": chat_folder})
        assert [(pair.chosen, pair.rejected) for pair in found] == [("chosen", "rejected")] * len(TALKS)
        assert [[message.to_dict() for message in as_messages(pair.prompt)] for pair in found] == [*TALKS.values()]
        assert not found.notes


def test_ids_of_responses_follow_those_of_their_prompt_and_plain_text_is_read(chat_folder):
    row = tokenized(chat_folder, "chosen_input_ids", TALKS["one turn"], stop=False)
    num = next(i for i, (a, b) in enumerate(zip(*list(row.values())[::2], strict=False)) if a != b)
    apart = {"prompt_input_ids": row["chosen_input_ids"][:num]}
    apart |= {name: ids[num:] for name, ids in row.items() if name.endswith("_ids")}
    for both in (apart, apart | row):  # older TRL keeps the prompt's ids beside whole conversations
        found = PreferenceDataset([both], layout={"tokenizer": chat_folder})[0]
        assert (found.chosen, as_messages(found.prompt)) == ("chosen", as_messages(TALKS["one turn"]))
    own = AutoTokenizer.from_pretrained(chat_folder)
    texts = {side: f"\n\nHuman: Why?\n\nAssistant: {side}" for side in ("chosen", "rejected")}
    plain = {f"{side}_ids": own(text)["input_ids"] for side, text in texts.items()}
    assert PreferenceDataset([plain], layout={"tokenizer": chat_folder})[0].rejected == "rejected"


def test_token_ids_that_cannot_be_read_exactly_are_refused_by_their_row(chat_folder):
    rows = [tokenized(chat_folder, "chosen_ids", TALKS["one turn"], stop=False) for _ in range(3)]
    rows[1]["chosen_ids"] = [*rows[1]["chosen_ids"][:5], 1, *rows[1]["chosen_ids"][5:]]
    with pytest.raises(DataError, match=r"row 2: the named tokenizer and its chat template give other token ids"):
        PreferenceDataset(rows, layout={"tokenizer": chat_folder})
    with pytest.raises(DataError, match=r"are token ids: name the tokenizer .* by a layout such as {tokenizer: NAME}"):
        PreferenceDataset(rows)
    with pytest.raises(DataError, match=r"pairs: the tokenizer ./absent cannot be loaded: "):
        PreferenceDataset(rows, layout={"tokenizer": "./absent"})
    with pytest.raises(DataError, match=r"row 1: there are no token ids of chosen; leave layout's tokenizer out"):
        PreferenceDataset([{"prompt": "a?", "chosen": "b", "rejected": "c"}], layout={"tokenizer": chat_folder})
