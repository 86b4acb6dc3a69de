"""Sides of a comparison: models, adapters, servers, pipelines, functions and files of scores."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import numpy as np
from transformers import AutoTokenizer

from rm_optimizer.core.importing.importing import import_reward_model
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.layouts import Layout
from rm_optimizer.core.pairs.pair import Message
from rm_optimizer.core.rows.columns import in_context
from rm_optimizer.core.rows.messages import read_response
from rm_optimizer.core.rows.prompts import read_prompt
from rm_optimizer.core.rows.readers import row_unit
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.core.tokens.tokenizer import added_tokens
from rm_optimizer.errors import ConfigError, DataError, NeedsImport
from rm_optimizer.evaluation.response_files import REWARD, FileKind, layout_rows
from rm_optimizer.explanation.probes import Conversation, conversation
from rm_optimizer.records.accelerator import fastest_device
from rm_optimizer.schema.checks import require

ScoreTexts: TypeAlias = Callable[[Sequence[Conversation]], list[float]]
_ASSUMED = {"logit": ("difference", "by the difference of its labels"), "input_form": ("plain", "as plain text")}
"""Options that an import may ask for, with the value that a comparison takes and its words."""
MOST_ROWS = 64
"""Most conversations of a file that are compared, evenly spaced by length."""


@dataclass(frozen=True)
class Side:
    """One of the two scorings.

    Args:
        name: its path, address or type.
        score: rewards of conversations, computed in one batch.
        model: the model, if it can be computed here.
        stored: conversations with their stored rewards; other conversations have none.
    """

    name: str
    score: ScoreTexts
    model: BradleyTerryRM | None = None
    stored: tuple[Conversation, ...] = ()

    @property
    def can_be_asked(self) -> bool:
        """True if it may answer otherwise in a batch or when it is asked again: no model of ours, no file."""
        return self.model is None and not self.stored


def model_side(source: object, max_length: int | None) -> Side | None:
    """The side of a model that can be computed here; None for a server, a file, a pipeline or a function."""
    if isinstance(source, str | os.PathLike):
        if _is_address(source) or is_scores(source):
            return None
        model, name = loaded_model(os.fspath(source), max_length)
        model.to(fastest_device())
    elif isinstance(source, BradleyTerryRM):
        model, name = source, source.model_name or type(source.model).__name__
    else:
        return None
    return Side(name, lambda talks: model.score(*_columns(talks)).tolist(), model)


def loaded_model(source: str, max_length: int | None, dtype: str | None = None) -> tuple[BradleyTerryRM, str]:
    """A model and its name; one in the form of another project as its import."""
    try:
        return BradleyTerryRM.from_pretrained(source, max_length=max_length, dtype=dtype), source
    except NeedsImport:
        name, options = f"{source}, as imported", dict[str, Any]()
    with TemporaryDirectory() as work:
        while True:
            try:
                import_reward_model(source, folder := Path(work, "imported"), max_length=max_length, **options)
                break
            except ConfigError as error:
                asked = [each for each in _ASSUMED if each not in options and each.replace("_", "-") in str(error)]
                if not asked:
                    raise
                options[asked[0]], words = _ASSUMED[asked[0]]
                name += f", {words}"
        model = BradleyTerryRM.from_pretrained(folder, dtype=dtype)
    model.tokenizer.name_or_path = source
    return model, name


def other_side(source: Any, renderer: ConversationRenderer, layout: object = None) -> Side:
    """The side of what is no model here.

    Args:
        source: address of a server, file of scores, object with `score`, `pipeline` or function of prompts and
            responses.
        renderer: rendering of the local model, for those that take text.
        layout: columns and parsed columns of a file, as the option `layout` has them.

    Raises:
        ConfigError: if it is something else.
        DataError: if a file has no prompts, responses and rewards.
    """
    lead, end, tokenizer = "", "", renderer.tokenizer
    with suppress(OSError, ValueError):  # a tokenizer without files
        plain = AutoTokenizer.from_pretrained(tokenizer.name_or_path, trust_remote_code=False)
        if renderer.is_written and not plain.chat_template:
            # The files have no template, so a server's tokenizer adds the special tokens to a text by itself.
            lead, end = ("".join(plain.convert_ids_to_tokens(list(ids))) for ids in added_tokens(plain))

    def text_of(talk: Conversation) -> str:
        return renderer.text(*talk).removeprefix(lead).removesuffix(end)

    if isinstance(source, str) and _is_address(source):
        return Side(source, _server(source, text_of))
    if isinstance(source, str | os.PathLike):
        return _file(Path(source), layout)
    name = type(source).__name__
    if hasattr(source, "score"):
        return Side(
            getattr(source, "url", name), lambda talks: np.asarray(source.score(*_columns(talks)), float).tolist()
        )
    if hasattr(source, "task") and hasattr(source, "tokenizer"):
        return Side(name, lambda talks: _of_pipeline(source, talks, text_of))
    if not callable(source):
        raise ConfigError(
            f"expected a model, address, file of scores, pipeline or function of prompts and responses, got {name}"
        )
    return Side(
        getattr(source, "__name__", name), lambda talks: np.asarray(source(*_columns(talks)), float).ravel().tolist()
    )


def _columns(talks: Sequence[Conversation]) -> tuple[list[Any], list[str]]:
    return [prompt for prompt, _ in talks], [response for _, response in talks]


def _is_address(source: str | os.PathLike[str]) -> bool:
    return os.fspath(source).startswith(("http://", "https://"))


def is_scores(source: str | os.PathLike[str]) -> bool:
    """True for the name of a file of scores."""
    return os.fspath(source).endswith((*FileKind, ".jsonl.gz"))


def read_conversations(path: Path, layout: object = None) -> Iterator[tuple[Conversation, float | None]]:
    """Conversations of a file with columns prompt and response (or lists `responses`), with rewards if it has them.

    Args:
        path: the file.
        layout: columns and parsed columns of the file, as the option `layout` has them.

    Raises:
        ConfigError: if the layout has other keys, such as the encoding of the file that was scored.
        DataError: naming the row, if it has no prompt with a response, or not as many rewards as responses; or if
            nothing tells how text is read that spells messages or lists.
    """
    if (form := Layout.of(layout)).encoding is not None:
        raise ConfigError("layout must have no encoding here, since rm-opt score writes UTF-8; leave it out")
    for number, row in layout_rows(path, form):
        listed = row.get("responses", [row.get("response")])
        try:
            if not isinstance(listed, list):
                raise ValueError(f"responses that are {type(listed).__name__} and no list")
            rewards = row.get(REWARD, [None] * len(listed))
            rewards = rewards if isinstance(rewards, list) else [rewards]
            prompt = in_context(row, read_prompt(row.get("prompt")), form.columns)
            talks = [conversation(prompt, read_response("response", text)) for text in listed]
            yield from zip(talks, rewards, strict=True)
        except (KeyError, ValueError) as error:
            where = f"{path}, {row_unit(path)} {number}"
            raise DataError(f"{where}: expected prompt, response and a number reward, got {error}") from error


def _file(path: Path, layout: object) -> Side:
    found = [(talk, reward) for talk, reward in read_conversations(path, layout) if reward is not None]
    if not found:
        raise DataError(f"{path}: expected rows with prompt, response and reward, as rm-opt score writes them")
    found.sort(key=lambda item: len(str(item[0])))
    kept = found[:: -(-len(found) // MOST_ROWS)]
    rewards = {id(talk): float(reward) for talk, reward in kept}
    return Side(str(path), lambda talks: [rewards[id(talk)] for talk in talks], stored=tuple(talk for talk, _ in kept))


def _of_pipeline(pipeline: Any, talks: Sequence[Conversation], text_of: Callable[[Conversation], str]) -> list[float]:
    """Scores of a `pipeline("text-classification")`: of its only label, or of the last of several."""
    tokenizer = pipeline.tokenizer
    if tokenizer.chat_template:
        turns = [[*map(Message.to_dict, prompt), Message("assistant", text).to_dict()] for prompt, text in talks]
        texts = [tokenizer.apply_chat_template(each, tokenize=False) for each in turns]
    else:
        texts = list(map(text_of, talks))
    last = max(pipeline.model.config.id2label.items())[1]
    answers = pipeline(texts, top_k=None, batch_size=len(texts))
    return [next(each["score"] for each in answer if each["label"] == last) for answer in answers]


def _server(address: str, text_of: Callable[[Conversation], str]) -> ScoreTexts:
    """Scores of `rm-opt serve`, or, by the path of the address, of a server that takes rendered texts."""
    from rm_optimizer.serving.client.client import RewardClient
    from rm_optimizer.serving.client.connection import TEXT_FORMS, Connection, Deadline

    path = urlsplit(address).path.rstrip("/")
    if not path:
        client = RewardClient(address)
        return lambda talks: client.score(*_columns(talks)).tolist()
    require(path in TEXT_FORMS, "the path of a server's address", f"be {' or '.join(TEXT_FORMS)}", address)

    async def ask(texts: list[str]) -> list[float]:
        connection = Connection(address.rstrip("/").removesuffix(path))
        deadline, model = Deadline(connection.url, connection.timeout_seconds), ""
        try:
            if path == "/classify":  # vLLM answers to the name of its model alone
                served = (await connection.request("GET", "/v1/models", deadline)).json()
                model = str(served["data"][0]["id"])
            return list((await connection.ask(TEXT_FORMS[path], texts, model, deadline)).rewards)
        finally:
            await connection.close()

    # In a thread, since a notebook has a running loop.
    return lambda talks: ThreadPoolExecutor(1).submit(asyncio.run, ask(list(map(text_of, talks)))).result()
