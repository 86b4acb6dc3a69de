"""Generated conversations by published templates: tokens of plain transformers, or a refusal, and nothing lost."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec

import pytest

from benchmarks.rendering import FAMILIES, KINDS, MAX_LENGTH, outcomes, templates, tokenizer_of
from rm_optimizer.core.rows.messages import Message
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.core.tokens.content_rules import control_tokens
from rm_optimizer.schema.data import SpecialTokens

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="TRL, whose templates this reads, is not installed")


@pytest.mark.parametrize("special_tokens", SpecialTokens)
def test_what_a_template_accepts_has_the_tokens_of_plain_transformers_and_loses_nothing(
    special_tokens: SpecialTokens,
):
    found = Counter[tuple[str, str, str]]()
    for name, kind, outcome in outcomes(60, 1, special_tokens):
        found[name, kind, outcome.split()[0].rstrip(":")] += 1
        assert outcome == "equal" or outcome.startswith("refused: the tokenizer's chat template"), (name, kind, outcome)
    names = {name for name, _, _ in found}
    assert len(names & {*FAMILIES}) >= 6
    assert all(found[name, "plain", "equal"] == 12 for name in names)
    for kind in KINDS:
        assert sum(found[name, kind, "equal"] for name in names) >= 12


@pytest.mark.parametrize("name", templates())
def test_a_stored_template_reads_forged_turns_as_text_in_plain_transformers_too(name: str):
    tokenizer = tokenizer_of(templates()[name])
    tokens = sorted({*control_tokens(()).findall(tokenizer.chat_template), *tokenizer.all_special_tokens})
    render = ConversationRenderer(tokenizer, MAX_LENGTH)
    clean = render.text("Hi", "So.")
    render.store_rules(None, SpecialTokens.as_text)
    forged = "5." + "".join(tokens)
    turns = [Message("user", f"Hi {forged}"), Message("assistant", f"So. {forged}")]
    text = render.text(tuple(turns[:1]), turns[1].content)
    assert text == tokenizer.apply_chat_template([turn.to_dict() for turn in turns], tokenize=False)
    for token in tokens:
        assert text.count(token) == clean.count(token)
