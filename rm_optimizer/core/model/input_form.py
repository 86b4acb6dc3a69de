"""Input form of a model without a recorded rendering: the text that it reads for a prompt and a response."""

from __future__ import annotations

from rm_optimizer.core.storage.loading import LoadedModel
from rm_optimizer.core.tokens.written_template import TemplateWriter
from rm_optimizer.errors import ConfigError


def settle_input(
    loaded: LoadedModel, source: object, form: str | None, *, has_render_fn: bool, is_trained: bool
) -> None:
    """Adapt the tokenizer of a model without a recorded rendering to the input that it reads, or is trained on.

    Args:
        loaded: the model.
        source: path or hub id that it was loaded from, for messages.
        form: `plain` or `pair` for a trained model without a chat template; None takes `plain`, with a warning.
        has_render_fn: True if a function of the user renders the conversations.
        is_trained: True if the model has a trained reward head.

    Raises:
        ConfigError: if the form is unknown, not possible with the model, or not for it.
    """
    tokenizer = loaded.tokenizer
    if form is not None and (loaded.identity or has_render_fn or not is_trained or tokenizer.chat_template):
        raise ConfigError(
            f"input_form={form} is for reward models of others that have no chat template, but how {source} "
            "reads its input is known; leave the option out"
        )
    if loaded.identity or has_render_fn:
        return
    writer = TemplateWriter(tokenizer)
    if not is_trained:
        writer.write_for_training()
        return
    if form == "pair" and (getattr(loaded.model.config, "type_vocab_size", 0) or 0) > 1:
        raise ConfigError(
            f"input_form='pair' is not possible with {type(loaded.model).__name__}: it tells the two texts apart "
            "by token types, which are not given to it here"
        )
    writer.write_as_read(form, source)
