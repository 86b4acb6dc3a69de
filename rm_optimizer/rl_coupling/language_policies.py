"""Causal language models that answer prompts, by transformers or by vLLM's offline engine."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rm_optimizer.core.model.identity import weights_digest
from rm_optimizer.core.pairs.pair import Prompt, as_messages, digest, prompt_id
from rm_optimizer.core.rows.messages import Message
from rm_optimizer.core.rows.prompts import split_context
from rm_optimizer.core.storage.loading import quiet_transformers
from rm_optimizer.core.tokens.conversation_text import ChatTemplate, plain_prompt
from rm_optimizer.errors import CheckpointError, ConversationRefused, DataError, MissingExtra
from rm_optimizer.records.accelerator import fastest_device
from rm_optimizer.records.randomness import keeping_random_state
from rm_optimizer.schema.checks import require

_log = logging.getLogger("rm_optimizer")


class TransformersPolicy:
    """A causal language model that answers with its chat template, or after `Assistant:` if it has none.

    Args:
        source: hub id or folder of a model with a language head.
        max_new_tokens: most tokens of a response, positive.
        temperature: divisor of the logits, positive.
        top_p: smallest probability mass to draw from, in (0, 1].
        samples_at_once: responses in one batch, positive. It limits memory; other values draw other responses.

    Raises:
        CheckpointError: if there is no such model, it is a reward model, or its tokenizer has no end of text.
        ConfigError: if an option is out of its range.
    """

    def __init__(
        self,
        source: str | Path,
        *,
        max_new_tokens: int = 128,
        temperature: float = 1.0,
        top_p: float = 1.0,
        samples_at_once: int = 64,
    ) -> None:
        _check_sampling(max_new_tokens, temperature, top_p)
        require(samples_at_once >= 1, "samples_at_once", "be positive", samples_at_once)
        self.tokenizer, self.model = load_language_model(source)
        self.model.eval().to(fastest_device())
        self._ends = end_ids(self.tokenizer, self.model.generation_config.eos_token_id, source)
        self._options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p}
        self._samples_at_once = samples_at_once

    @property
    def identity(self) -> str:
        """Digest of weights, template and sampling options."""
        template = self.tokenizer.chat_template
        return digest([weights_digest(self.model), template, self._options, self._samples_at_once, sorted(self._ends)])

    @torch.inference_mode()
    def respond(self, prompt: Prompt, num_samples: int, seed: int) -> list[str]:
        """Draw responses to a prompt.

        Raises:
            DataError: if the prompt leaves no room for a response.
        """
        ids = prompt_ids(self.tokenizer, prompt)
        require_room(self.model, len(ids), int(self._options["max_new_tokens"]))
        texts: list[str] = []
        batch = torch.tensor([ids], device=self.model.device)
        while len(texts) < num_samples:
            rows = min(self._samples_at_once, num_samples - len(texts))
            with keeping_random_state(seed=_seed(prompt, seed, len(texts))):
                found = self.model.generate(
                    batch,
                    attention_mask=torch.ones_like(batch),
                    do_sample=True,
                    top_k=0,
                    num_return_sequences=rows,
                    eos_token_id=sorted(self._ends),
                    pad_token_id=min(self._ends),
                    **self._options,
                )
            texts += [_text(self.tokenizer, row[len(ids) :].tolist(), self._ends) for row in found]
        return texts


class VLLMPolicy:
    """A causal language model that answers through vLLM's offline engine (extra `vllm`).

    Args:
        source: hub id or folder of a model with a language head.
        max_new_tokens: most tokens of a response, positive.
        temperature: divisor of the logits, positive.
        top_p: smallest probability mass to draw from, in (0, 1].
        engine_options: keywords of `vllm.LLM`.

    Raises:
        MissingExtra: if vLLM is not installed.
        CheckpointError: if the source is a reward model.
        ConfigError: if an option is out of its range.
    """

    def __init__(
        self,
        source: str | Path,
        *,
        max_new_tokens: int = 128,
        temperature: float = 1.0,
        top_p: float = 1.0,
        **engine_options: Any,
    ) -> None:
        _check_sampling(max_new_tokens, temperature, top_p)
        try:
            import vllm
        except ImportError as error:
            raise MissingExtra("vLLM", "vllm") from error
        require_language_model(source)
        self._vllm = vllm
        self._engine = vllm.LLM(model=str(source), seed=0, **engine_options)
        self.tokenizer = self._engine.get_tokenizer()
        self._options = {"max_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p}
        self._source = str(source)

    @property
    def identity(self) -> str:
        """Digest of source, vLLM's version and sampling options."""
        return digest([self._source, self._vllm.__version__, self._options])

    def respond(self, prompt: Prompt, num_samples: int, seed: int) -> list[str]:
        """Draw responses to a prompt; vLLM computes the prompt once for all of them."""
        options = self._vllm.SamplingParams(n=num_samples, seed=_seed(prompt, seed, 0), **self._options)
        tokens = {"prompt_token_ids": prompt_ids(self.tokenizer, prompt)}
        (found,) = self._engine.generate([tokens], options, use_tqdm=False)
        outputs = sorted(found.outputs, key=lambda output: output.index)
        return [_text(self.tokenizer, list(output.token_ids), {self.tokenizer.eos_token_id}) for output in outputs]


def plain_turns(prompt: Prompt) -> list[dict[str, Any]]:
    """The prompt's messages as TRL's trainers take them, which take nothing else.

    Raises:
        ValueError: if the prompt has tools or other values in addition to its messages.
    """
    context, messages = split_context(as_messages(prompt))
    if context:
        raise ValueError(f"the prompt has {', '.join(context)}, which a policy does not read; leave it out")
    return [message.to_dict() for message in messages]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Token ids of a prompt, up to the start of the response.

    Raises:
        ConversationRefused: if the prompt has tools or other values that the tokenizer's template does not read.
    """
    context, messages = split_context(as_messages(prompt))
    start = list[int]()
    if tokenizer.chat_template is not None:
        text = ChatTemplate(tokenizer).rendered(list(map(Message.to_dict, messages)), context, open_turn=True)
    elif lost := [*context, *(name for message in messages for name in message.fields)]:
        raise ConversationRefused(f"a policy without a chat template reads no {lost[0]}, which the prompt has")
    else:
        text = plain_prompt(messages)
        start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return [*start, *tokenizer(text, add_special_tokens=False)["input_ids"]]


def _text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], ends: Collection[int]) -> str:
    """The text before the first end token, without special tokens and surrounding whitespace."""
    end = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    return str(tokenizer.decode(ids[:end], skip_special_tokens=True)).strip()


def load_language_model(source: str | Path) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Load the tokenizer and model of a policy, without the sampling settings of its files, and require all weights.

    Raises:
        CheckpointError: if there is no such model, or it has no language head.
    """
    require_language_model(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source))
        with quiet_transformers():
            model, report = AutoModelForCausalLM.from_pretrained(
                str(source), dtype=torch.float32, output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{source} cannot be loaded as a policy: {reason}") from error
    if missing := sorted(report["missing_keys"]):
        raise CheckpointError(f"{source} lacks weights of a language model, among them {missing[0]}; give another")
    # generate() and TRL fill what their caller leaves open from this file, so that only its tokens are kept
    shipped = {name: each for name, each in model.generation_config.to_diff_dict().items() if name[0] != "_"}
    tokens = {name: shipped.pop(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in shipped}
    model.generation_config = GenerationConfig(**tokens)
    if dropped := sorted(shipped.keys() - {"transformers_version"}):
        _log.warning("%s: generation_config.json is not used for sampling: %s", source, ", ".join(dropped))
    return tokenizer, model


def require_language_model(source: str | Path) -> None:
    """Refuse a source without a language head, before its weights are read.

    Raises:
        CheckpointError: if there is no model, or it is a classifier.
    """
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise CheckpointError(f"{source} holds no config.json; give the folder of a causal language model as policy")
    try:
        config = AutoConfig.from_pretrained(str(source))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{source} cannot be loaded as a policy: {reason}") from error
    if any("Classification" in name for name in config.architectures or ()):
        raise CheckpointError(
            f"{source} is a reward model ({config.architectures[0]}), which writes no text; give a causal language "
            "model as policy"
        )


def require_room(model: PreTrainedModel, num_tokens: int, num_new: int) -> None:
    """Refuse a prompt that leaves no room for a response.

    Raises:
        DataError: naming both lengths.
    """
    room = getattr(model.config, "max_position_embeddings", None)
    if room is not None and num_tokens + num_new > room:
        raise DataError(
            f"a prompt of {num_tokens} tokens and {num_new} new ones exceed the policy's {room} positions; shorten "
            "the prompt or lower max_new_tokens"
        )


def _check_sampling(max_new_tokens: int, temperature: float, top_p: float) -> None:
    require(max_new_tokens >= 1, "max_new_tokens", "be positive", max_new_tokens)
    require(0 < temperature < float("inf"), "temperature", "be positive and finite", temperature)
    require(0 < top_p <= 1, "top_p", "lie in (0, 1]", top_p)


def end_ids(tokenizer: PreTrainedTokenizerBase, configured: int | list[int] | None, source: str | Path) -> set[int]:
    """Tokens that end a response; no pad token is needed, since all tokens after the first end are cut.

    Raises:
        CheckpointError: if there is no such token.
    """
    of_model = [configured] if isinstance(configured, int) else configured or []
    ends = {*of_model, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}
    if not ends:
        raise CheckpointError(
            f"{source} has neither an end-of-text nor a pad token, so its responses would never end; set eos_token in "
            "its tokenizer"
        )
    return ends


def _seed(prompt: Prompt, seed: int, start: int) -> int:
    """Seed of one batch of responses, independent of earlier draws."""
    return int(digest([prompt_id(prompt), seed, start])[:8], 16)
