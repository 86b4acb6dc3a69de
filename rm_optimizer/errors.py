"""Failures that a caller may catch, and the sentences that report them. Imports no torch.

RMOptimizerError
├── ConfigError           an option: unknown, out of range, or in conflict with another
├── DataError             a file, a row or a data set that cannot be used
│   ├── DataStalled       a data-loader batch that did not come in time
│   └── ConversationRefused   a conversation that the tokenizer's chat template does not write whole
├── CheckpointError       a model or checkpoint that is missing, damaged or not what it claims to be
│   └── NeedsImport       a reward model in the form of another project
├── MissingExtra          an optional dependency that is not installed
├── DiskError             a file that cannot be written
├── OutOfMemory           a pass that does not fit into the memory of its device
├── TrainingDiverged      a loss that is not finite
├── Interrupted           a run the user stopped
├── RewardServerUnavailable   a reward server that did not answer in time
├── RewardServerRefused   a request that a reward server refuses
├── HandshakeFailed       a reward server whose rewards cannot be trusted
├── WrongAnswer           an answer that is not the requested rewards
├── WrongVersion          an answer from other weights than expected
├── PublishFailed         new weights that are not served
├── TransferFailed        a process group for weights that did not form or broke
├── WeightsRefused        new weights that an engine did not accept
└── EngineUnavailable     an engine that cannot answer now
    └── EngineFailed      an engine that will not answer again

The package's own server reports errors over HTTP as `ApiError`s of `rm_optimizer.serving.service.api_errors`; clients
raise them as `RewardServerRefused`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RMOptimizerError(Exception):
    """A failure with a remedy. Its text is one sentence for the user, and the command exits with `exit_code`."""

    exit_code = 2


class ConfigError(RMOptimizerError):
    """An option is unknown, out of its range, or conflicts with another."""


class DataError(RMOptimizerError):
    """A file, row or data set cannot be used; the text names file and row."""


class DataStalled(DataError):
    """A data-loader batch took longer than `data.fetch_timeout`."""


class ConversationRefused(DataError):
    """A conversation cannot be rendered: its chat template refuses it or leaves out a part of it."""


class CheckpointError(RMOptimizerError):
    """A model folder or checkpoint is missing, incomplete, or does not match its own records."""


class NeedsImport(CheckpointError):
    """A reward model is stored in the form of another project, which `rm-opt import` reads."""


class MissingExtra(RMOptimizerError):
    """An optional dependency is not installed; the text contains the pip command that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(package, extra)  # what a process that receives the error builds it from

    def __str__(self) -> str:
        return "{} is not installed; pip install 'rm-optimizer[{}]'".format(*self.args)


class DiskError(RMOptimizerError):
    """A file cannot be written: the disk is full or read-only, or permission is missing."""

    exit_code = 5


class OutOfMemory(RMOptimizerError):
    """A pass does not fit into the memory of its device; the text names the option that makes it smaller."""


class TrainingDiverged(RMOptimizerError):
    """The loss became NaN or infinite; the text names step, pairs and the last good checkpoint."""

    exit_code = 3


class Interrupted(RMOptimizerError):
    """The user stopped a run; the text names the checkpoint it left."""

    exit_code = 130


class RewardServerUnavailable(RMOptimizerError):
    """The reward server did not answer within the given time; no reward is returned in its place."""


class RewardServerRefused(RMOptimizerError):
    """The reward server refused a request; a repetition would be refused too.

    Args:
        message: the server's error message.
        status: HTTP status.
        kind: the error's type.
    """

    def __init__(self, message: str, status: int, kind: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


class HandshakeFailed(RMOptimizerError):
    """The server failed the verification of its rewards; the text states the reason."""


class WrongAnswer(RMOptimizerError):
    """A reward server's answer is not the requested rewards."""


class WrongVersion(RMOptimizerError):
    """The answer came from another version than the caller expects."""


class PublishFailed(RMOptimizerError):
    """The new weights are not served, or the outcome is unknown; the text states which, and the reason."""


class TransferFailed(RMOptimizerError):
    """The process group for weights did not form or broke; nothing was changed."""


class WeightsRefused(RMOptimizerError):
    """The new weights were rejected and the old ones stay. The text names the tensor or probe at fault."""


class EngineUnavailable(RMOptimizerError):
    """The engine cannot answer now: it is starting, restarting, or has stopped for good."""


class EngineFailed(EngineUnavailable):
    """The engine will not answer again, and its process ends."""


def nearest(got: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """The most similar known name, in a list that is empty if none has this share of equal letters."""
    return difflib.get_close_matches(got, list(known), n=1, cutoff=cutoff)


def did_you_mean(kind: str, got: str, known: Iterable[str]) -> str:
    """Sentence about an unknown name, with the most similar known name if there is one.

    Example:
        >>> did_you_mean("optimizer", "moun", ["adamw", "lion", "muon"])
        "unknown optimizer 'moun'; did you mean 'muon'? Known: adamw, lion, muon"
    """
    names = sorted(set(known))
    hint = "".join(f"did you mean '{near}'? " for near in nearest(got, names, 0.5))
    return f"unknown {kind} '{got}'; {hint}Known: {', '.join(names) or 'none'}"


def require_known(kind: str, got: str, known: Iterable[str], error: type[Exception] = ConfigError) -> None:
    """Refuse a name that is not among the known ones.

    Raises:
        ConfigError: by the sentence of `did_you_mean`; `error` in its place, such as TypeError for an argument.
    """
    names = list(known)
    if got not in names:
        raise error(did_you_mean(kind, got, names))


def needs_import(source: object, reason: str) -> NeedsImport:
    """The error of a model that a classifier of `transformers` does not read as it is stored.

    Args:
        source: path or name that it was loaded from.
        reason: evidence for it, a main clause.
    """
    return NeedsImport(
        f"{source} cannot be loaded as it is stored: {reason}; bring a reward model of another project into a "
        f"classifier's form with rm-opt import {source} FOLDER"
    )


def no_trained_head(source: object, reason: str) -> CheckpointError:
    """The error of a model without a trained reward head.

    Args:
        source: path or name that it was loaded from.
        reason: second part of the sentence, the evidence for it.
    """
    return CheckpointError(
        f"{source} has no trained reward head: {reason}; give a trained reward model, or train one from it with "
        f"rm-opt train model.path={source} (in Python: from_pretrained(..., new_head=True))"
    )
