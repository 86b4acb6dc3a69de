"""Tokenized pairs on disk, built once for a content, tokenizer, rendering and length, and memory mapped by every run.

A cache folder is named by its fingerprint and contains one flat array of token ids with offsets. It is built under
another name and renamed when it is complete, so that runs that start together never read an incomplete one. The
checksum of each file is stored, so that a damaged or changed folder is built again.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
import uuid
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from rm_optimizer.core.pairs.pair import PreferencePair, as_messages, digest
from rm_optimizer.core.rows.bad_rows import PairRow, SkippedRow
from rm_optimizer.core.rows.messages import response_json
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.errors import DataError
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.schema.data import OverLong, Spelling

_LAYOUT = 3
_CHUNK = 1024
_PROGRESS_FROM = 20_000
_ABANDONED_SECONDS = 86_400
_ARRAYS: Mapping[str, type[np.integer[Any]]] = {
    "tokens": np.int32,
    "offsets": np.int64,
    "pair_index": np.int64,
    "num_cut": np.int32,
}


@dataclass(frozen=True)
class TruncationReport(JsonRecord):
    """Effect of the length limit on a data set.

    Args:
        max_length: the limit, in tokens.
        num_pairs: number of given pairs.
        num_identical_dropped: number of pairs with two equal sequences after truncation; training drops them, and an
            evaluation counts them as ties.
        num_prompt_cut: number of pairs with a side that lost prompt tokens.
        num_uneven_prompt_cut: number of pairs whose sides lost different parts of their common prompt, so that a header
            or system turn may be on one side only.
        num_response_cut: number of pairs with a side that lost response tokens.
        tokens_cut_share: cut tokens as a share of all tokens, in [0, 1].
        length_quantiles: tokens of a sequence before cutting, at 0.5, 0.9, 0.99 and 1.
    """

    max_length: int
    num_pairs: int
    num_identical_dropped: int
    num_prompt_cut: int
    num_uneven_prompt_cut: int
    num_response_cut: int
    tokens_cut_share: float
    length_quantiles: dict[str, float]


@dataclass(eq=False)
class PairTokens:
    """Token ids of pairs.

    Args:
        tokens: ids of all sequences, chosen and rejected in turn.
        lengths: tokens of the chosen and the rejected sequence, shape (pairs, 2).
        pair_index: position of each pair in its data set.
    """

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int64]
    pair_index: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.pair_index)

    @cached_property
    def _offsets(self) -> NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def chosen(self, i: int) -> NDArray[np.int32]:
        """Token ids of the preferred sequence of pair i; read-only."""
        return self.tokens[self._offsets[2 * i] : self._offsets[2 * i + 1]]

    def rejected(self, i: int) -> NDArray[np.int32]:
        """Token ids of the other sequence of pair i; read-only."""
        return self.tokens[self._offsets[2 * i + 1] : self._offsets[2 * i + 2]]


class TokenizedPairs(PairTokens):
    """The token ids of preference pairs, memory mapped from a cache folder; a pickle contains only the folder's path.

    Attributes:
        folder: a complete cache folder from `tokenize_pairs`.
        lengths: tokens of the chosen and the rejected sequence, shape (pairs, 2).
        pair_index: position of each pair among the given ones, without pairs that are equal after truncation.
        num_cut: tokens cut from both sequences of every given pair, shape (given pairs, 2).
        report: effect of truncation on all given pairs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        lengths = np.diff(np.array(_mapped(folder, "offsets"))).reshape(-1, 2)
        super().__init__(_mapped(folder, "tokens"), lengths, np.array(_mapped(folder, "pair_index")))
        self.num_cut = np.array(_mapped(folder, "num_cut")).reshape(-1, 2)
        self.report = TruncationReport(**_read_meta(folder)["report"])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the folder's path, since the pickle of a memory map would contain all tokens."""
        return type(self), (self.folder,)


@dataclass(frozen=True, eq=False)
class EncodedPairs:
    """Token ids of pairs in memory, and what truncation did to all of them.

    Args:
        tokens: ids of the pairs whose two sequences differ, chosen and rejected in turn.
        lengths: tokens of both sequences of every pair after cutting, shape (all pairs, 2).
        cuts: tokens cut from prompt and response of both, shape (all pairs, 2, 2).
        differ: True for each pair whose two sequences differ.
    """

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int64]
    cuts: NDArray[np.int32]
    differ: NDArray[np.bool_]

    @classmethod
    def of(cls, pairs: Sequence[PreferencePair], renderer: ConversationRenderer) -> EncodedPairs:
        """Encode both sequences of each pair; a response in many pairs is encoded once.

        Raises:
            ConversationRefused: if the chat template refuses a conversation.
        """
        given = [(pair.prompt, response) for pair in pairs for response in (pair.chosen, pair.rejected)]
        distinct = dict.fromkeys(given)
        found = renderer.encode_batch([prompt for prompt, _ in distinct], [response for _, response in distinct])
        encoding_of = dict(zip(distinct, found, strict=True))
        sides = [encoding_of[side] for side in given]
        both = [(chosen.ids, rejected.ids) for chosen, rejected in zip(sides[0::2], sides[1::2], strict=True)]
        kept = (ids for pair in both if pair[0] != pair[1] for ids in pair)
        return cls(
            tokens=np.fromiter(chain.from_iterable(kept), dtype=np.int32),
            lengths=np.array([len(side.ids) for side in sides], dtype=np.int64).reshape(-1, 2),
            cuts=np.array([(s.prompt_cut, s.response_cut) for s in sides], dtype=np.int32).reshape(-1, 2, 2),
            differ=np.array([chosen != rejected for chosen, rejected in both], dtype=bool),
        )


def encoded_chunks(pairs: Sequence[PreferencePair], renderer: ConversationRenderer) -> Iterator[EncodedPairs]:
    """The pairs encoded in parts of bounded size, at least one, with a progress bar for large sets."""
    console, hidden = Console(stderr=True), len(pairs) <= _PROGRESS_FROM
    starts = range(0, max(1, len(pairs)), _CHUNK)
    for start in track(starts, "Tokenizing", console=console, transient=True, disable=hidden):
        yield EncodedPairs.of([pairs[i] for i in range(start, min(start + _CHUNK, len(pairs)))], renderer)


def tokenize_pairs(
    pairs: Sequence[PreferencePair], renderer: ConversationRenderer, cache_dir: Path | None
) -> TokenizedPairs:
    """Token ids of the pairs, from the cache if they were tokenized before.

    Runs that start together may each build the cache. The cache of the first one to finish is kept, and the others use
    it.

    Args:
        pairs: pairs to tokenize.
        renderer: renderer that turns prompt and response into token ids.
        cache_dir: folder that contains the cache folders; None means `default_cache_dir()`. If it cannot be written
            to, a temporary folder is used instead, with a warning.

    Raises:
        DataError: if the chat template refuses a conversation, or the disk is full.
    """
    cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir)
    folder = cache_dir / _fingerprint(pairs, renderer)
    if _is_intact(folder):
        return TokenizedPairs(folder)
    parent = _writable(cache_dir)
    work = parent / f".building-{uuid.uuid4().hex}"
    try:
        work.mkdir()
        _build(work, pairs, renderer)
        return TokenizedPairs(_put_in_place(work, parent / folder.name))
    except OSError as error:
        raise DataError(
            f"tokenized data could not be written to {parent} ({error.strerror}); "
            "free space there or set data.cache_dir to another folder"
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def default_cache_dir() -> Path:
    """The user's cache folder: `$RM_OPT_CACHE`, else `rm_optimizer` in the platform's folder for caches."""
    if chosen := os.environ.get("RM_OPT_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "rm_optimizer"
    variable, fallback = ("LOCALAPPDATA", "AppData/Local") if sys.platform == "win32" else ("XDG_CACHE_HOME", ".cache")
    return Path(os.environ.get(variable) or Path.home() / fallback) / "rm_optimizer"


def _fingerprint(pairs: Sequence[PreferencePair], renderer: ConversationRenderer) -> str:
    """16 hexadecimal digits of everything that the token ids depend on."""
    tokenizer = renderer.tokenizer
    template = None if renderer.kind == "custom" else tokenizer.chat_template
    if tokenizer.is_fast:  # without the padding and truncation of the last call
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        known: Any = {key: value for key, value in state.items() if key not in ("padding", "truncation")}
    else:
        special = repr(sorted(tokenizer.special_tokens_map.items()))
        known = [type(tokenizer).__name__, tokenizer.get_vocab(), special]
    setting = [_LAYOUT, renderer.identity(), template, digest(known), sorted(renderer.refused_tokens)]
    content = hashlib.sha256(digest(setting).encode())
    for pair in pairs:
        prompt = [[m.role, m.content, *([m.fields] if m.fields else [])] for m in as_messages(pair.prompt)]
        texts = [prompt, response_json(pair.chosen), response_json(pair.rejected)]
        if renderer.kind == "custom":
            # A function has no digest, so the texts that it makes of the pair are used instead.
            texts = [renderer.text(pair.prompt, response) for response in (pair.chosen, pair.rejected)]
        content.update(json.dumps(texts).encode())
    return content.hexdigest()[:16]


def _build(folder: Path, pairs: Sequence[PreferencePair], renderer: ConversationRenderer) -> None:
    """Tokenize chunk by chunk into `folder`, and write the metadata with the checksums last."""
    parts = []
    with (folder / "tokens.bin").open("wb") as file:
        for chunk in encoded_chunks(pairs, renderer):
            chunk.tokens.tofile(file)
            parts.append((chunk.lengths, chunk.cuts, chunk.differ))
    lengths, cuts, differ = map(np.concatenate, zip(*parts, strict=True))
    arrays = {
        "offsets": np.concatenate([[0], np.cumsum(lengths[differ])]),
        "pair_index": np.flatnonzero(differ),
        "num_cut": cuts.sum(axis=2),
    }
    for name, values in arrays.items():
        values.astype(_ARRAYS[name]).tofile(folder / f"{name}.bin")
    report = truncation_report(renderer.max_length, lengths, cuts, int(differ.sum()))
    checksums = {name: _checksum(folder, name) for name in _ARRAYS}
    (folder / "meta.json").write_text(json.dumps({"report": asdict(report), "checksums": checksums}))


def cut_counts(cuts: NDArray[np.int32]) -> dict[str, int]:
    """Counts of a `TruncationReport` by name, from the tokens cut of both sides, shape (pairs, 2, 2)."""
    return {
        "num_pairs": len(cuts),
        "num_prompt_cut": int((cuts[:, :, 0] > 0).any(axis=1).sum()),
        "num_uneven_prompt_cut": int((cuts[:, 0, 0] != cuts[:, 1, 0]).sum()),
        "num_response_cut": int((cuts[:, :, 1] > 0).any(axis=1).sum()),
    }


def over_long_rows(
    num_cut: NDArray[np.integer[Any]], rows: Sequence[PairRow], max_length: int, over_long: OverLong
) -> dict[int, SkippedRow]:
    """Pairs to leave out because a sequence is too long, by position, as rows that give no pair.

    Args:
        num_cut: tokens that truncation cuts from both sequences of each pair, shape (pairs, 2).
        rows: row of each pair; empty for pairs that were not read from rows.
        max_length: most tokens of a sequence.
        over_long: treatment of such pairs; `truncate` leaves none out.

    Raises:
        DataError: if `over_long` refuses them; the text names file and row.
    """
    found: dict[int, SkippedRow] = {}
    for position in np.flatnonzero(num_cut.any(axis=1)).tolist() if over_long != OverLong.truncate else ():
        num_tokens = max_length + int(num_cut[position].max())
        path, number = (rows[position].tally.path, rows[position].number) if rows else ("pairs", position + 1)
        reason = f"a sequence has more than max_length={max_length} tokens, got {num_tokens:,}"
        found[position] = SkippedRow(path, number, reason)
        if over_long == OverLong.refuse:
            entrance = rows[position].tally.entrance if rows else Spelling.python
            option = entrance.option("over_long", OverLong.drop.value)
            raise DataError(f"{found[position]}; raise that limit, shorten the row, or leave such pairs out: {option}")
    return found


def truncation_report(
    max_length: int, lengths: NDArray[np.int64], cuts: NDArray[np.int32], num_kept: int
) -> TruncationReport:
    """Effect of truncation on pairs.

    Args:
        max_length: the limit, in tokens.
        lengths: tokens of both sequences of each pair after truncation, shape (pairs, 2).
        cuts: tokens cut from prompt and response of both sequences, shape (pairs, 2, 2).
        num_kept: number of pairs whose two sequences still differ.
    """
    before = lengths + cuts.sum(axis=2)
    quantiles = np.quantile(before, (0.5, 0.9, 0.99, 1.0)) if before.size else np.zeros(4)
    return TruncationReport(
        max_length=max_length,
        num_identical_dropped=len(lengths) - num_kept,
        **cut_counts(cuts),
        tokens_cut_share=float(cuts.sum() / max(1, before.sum())),
        length_quantiles=dict(zip(("0.5", "0.9", "0.99", "1"), quantiles.tolist(), strict=True)),
    )


def _put_in_place(work: Path, folder: Path) -> Path:
    """Rename the finished `work` to `folder`; if another run was first, use its folder."""
    while True:
        try:
            os.rename(work, folder)
        except OSError:
            if _is_intact(folder):
                return folder
            if not folder.exists():
                raise
            torn = folder.with_name(f".torn-{uuid.uuid4().hex}")
            with contextlib.suppress(FileNotFoundError):  # another run moved it first
                os.rename(folder, torn)
            shutil.rmtree(torn, ignore_errors=True)
        else:
            return folder


def _writable(folder: Path) -> Path:
    """The folder, which is made if it is missing; a temporary one for this process if it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        for work in folder.glob(".building-*"):  # left by builds that were killed
            with contextlib.suppress(FileNotFoundError):
                if time.time() - work.stat().st_mtime > _ABANDONED_SECONDS:
                    shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        spare = Path(tempfile.mkdtemp(prefix="rm_optimizer-"))
        atexit.register(shutil.rmtree, spare, ignore_errors=True)
        warnings.warn(
            f"tokenized data cannot be kept in {folder} ({error.strerror}) and goes to {spare} for this run only; "
            "set data.cache_dir or RM_OPT_CACHE to a folder that can be written to",
            stacklevel=3,
        )
        return spare
    return folder


def _is_intact(folder: Path) -> bool:
    """True if every file exists with the content that was written."""
    try:
        meta = _read_meta(folder)
        TruncationReport(**meta["report"])
        checksums = meta["checksums"]
        return all(_checksum(folder, name) == checksums[name] for name in _ARRAYS)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _read_meta(folder: Path) -> dict[str, Any]:
    meta: dict[str, Any] = json.loads((folder / "meta.json").read_text())
    return meta


def _checksum(folder: Path, name: str) -> int:
    return zlib.crc32(_mapped(folder, name).data)


def _mapped(folder: Path, name: str) -> NDArray[Any]:
    path = folder / f"{name}.bin"
    if not path.stat().st_size:
        return np.zeros(0, dtype=_ARRAYS[name])  # an empty file cannot be mapped
    return np.memmap(path, dtype=_ARRAYS[name], mode="r")
