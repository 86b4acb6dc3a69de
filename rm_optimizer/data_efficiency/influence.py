"""Influence of training pairs on a number that a reward model gives, such as a margin or a bias of style.

The influence of a pair is the change of the number when the pair is left in training (Koh & Liang, 2017,
arXiv:1703.04730), with the Gauss-Newton matrix `H = sum_i J_i^T C_i J_i` in place of the Hessian:

    tau_i = -g_i^T (I - h_i C_i)^-1 J_i (H + damping I)^-1 phi,    h_i = J_i (H + damping I)^-1 J_i^T

`J_i` is the gradient of a pair's margin (for a loss that reads more than margins, of its two rewards), `g_i` and `C_i`
are the first and second derivative of its loss by it, times the pair's weight, and `phi` is the number's gradient. The
second factor takes the pair's own curvature out of `H`, so that this is one Newton step of the loss without the pair.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from scipy.sparse import csr_matrix

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import PreferencePair, digest
from rm_optimizer.data_efficiency.blame import (
    MOST_LISTED,
    Blame,
    Half,
    Of,
    PairBlame,
    datamodeling_score,
    groups_of_column,
    rank_correlation,
)
from rm_optimizer.data_efficiency.margin_analysis import word_vectors
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.evaluation.draws import draw_pairs
from rm_optimizer.landscape.operators.damped import DampedSystem, LossDerivatives, damping_by_gap
from rm_optimizer.landscape.operators.gauss_newton import reward_gradients
from rm_optimizer.landscape.operators.objective import PairObjective, measuring
from rm_optimizer.landscape.operators.parameters import TRAINABLE
from rm_optimizer.landscape.operators.single_pairs import identity_of
from rm_optimizer.landscape.operators.support import support_of
from rm_optimizer.records.accelerator import rank_in_group
from rm_optimizer.records.files import replacing
from rm_optimizer.schema import LossConfig
from rm_optimizer.schema.checks import require

COLUMNS = ("source", "subset", "annotator")
"""Columns that group pairs if none are named."""
FALLBACK = 1e-2
"""Damping without held-out pairs, as a share of the largest eigenvalue of `H`."""


@dataclass(frozen=True)
class BlameTarget:
    """The mean over pairs of the margin or of the loss, or a direction of the weights.

    Args:
        name: its name, for a reader.
        pairs: the pairs; ignored for an eigenvector.
        of: `margin`; `loss`, which counts as far as it depends on the margin; or `eigenvector`, the weights' coordinate
            along the first eigenvector of `H`, turned so that the training raised it.
    """

    name: str
    pairs: Sequence[PreferencePair]
    of: Of = "margin"

    def __post_init__(self) -> None:
        if self.of == "eigenvector":
            object.__setattr__(self, "pairs", ())


def blame(
    models: BradleyTerryRM | Iterable[BradleyTerryRM],
    train: Sequence[PreferencePair],
    target: BlameTarget | PreferencePair | Sequence[PreferencePair],
    *,
    held_out: Sequence[PreferencePair] = (),
    loss: LossConfig | None = None,
    params: str | Sequence[str] = TRAINABLE,
    columns: Sequence[str] | None = None,
    damping: float | None = None,
    memory_gib: float = 4.0,
    halves: Sequence[Half] = (),
    folder: Path | None = None,
    token_budget: int = 8192,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Blame:
    """Influence of training pairs, and of groups of them, on a number that a reward model gives.

    Gradients are exact if they fit into the memory, and otherwise projected (`reward_gradients`). Without `damping`, it
    is chosen so that the mean loss of the training pairs, each predicted as if it were left out, equals the mean loss
    of the held-out pairs: a damping that is too small makes each pair too influential, and predicts a larger gap
    between the two losses than the model has. No retraining is needed.

    Args:
        models: the model, or several, such as its checkpoints or other seeds, whose influences are averaged.
        train: pairs that it was trained on, in their order.
        target: the number; a pair or pairs are their mean margin.
        held_out: pairs that the model was not trained on, for the choice of the damping.
        loss: loss of the training; None is the plain Bradley-Terry loss.
        params: parameters that were trained; see `select_parameters`.
        columns: columns of the pairs' metadata that group them; `prompt` groups by prompt. None takes those of
            `COLUMNS` that have more than one group.
        damping: share of the largest eigenvalue of `H`; None takes the rule.
        memory_gib: most memory for gradients.
        halves: models that were trained on parts of the pairs, for the validation.
        folder: folder for gradients, from which a stopped call continues; None keeps them in memory. The processes of a
            group of `torch.distributed` share the pairs through it.
        token_budget: most tokens of a micro-batch; it changes no result.
        seed: seed of projection, shuffles and intervals.
        on_progress: function of the number of gradients done and of all.

    Raises:
        ConfigError: if the damping is not positive, or no parameter is selected.
        DataError: if there are fewer than two training pairs, or no pair of the target is left after truncation.
    """
    require(damping is None or damping > 0, "damping", "be positive", damping)
    if not isinstance(target, BlameTarget):
        pairs = [target] if isinstance(target, PreferencePair) else list(target)
        target = BlameTarget(f"margin of {len(pairs):,} pairs" if len(pairs) > 1 else "margin of a pair", pairs)
    if halves and target.of == "eigenvector":
        raise ConfigError("halves need a target of pairs, which an eigenvector is not")
    if len(train) < 2:
        raise DataError(f"blame needs at least 2 training pairs, got {len(train)}")
    by_column = _columns(train, columns)
    given = [models] if isinstance(models, BradleyTerryRM) else models
    found = [
        _of_model(
            model, train, target, held_out, loss or LossConfig(), params=params, damping=damping, folder=folder,
            memory=memory_gib * 2**30, token_budget=token_budget, seed=seed, on_progress=on_progress,
            is_combined=not halves or target.of == "eigenvector",
        )
        for model in given
    ]  # fmt: skip
    if not found:
        raise ConfigError("blame needs at least one model, got none")
    by_model = [one.influence for one in found]
    influence, by_words = np.mean(by_model, axis=0), word_influence(train, target.pairs, found[-1].weights)[:, 0]
    prompts = [pair.prompt_id for pair in train]
    groups = [
        group
        for name, values in by_column.items()
        for group in groups_of_column(name, np.array(values), influence, by_words, by_model, prompts, seed)
    ]

    def listed(places: np.ndarray) -> tuple[PairBlame, ...]:
        return tuple(_described(place, train[place], influence, by_words, by_column) for place in places.tolist())

    validated = of_words = above_words = None
    if halves:
        of_pairs, words = np.mean([one.of_pairs for one in found], axis=0), word_influence(train, target.pairs)
        validated, of_words = (datamodeling_score(each, halves, seed=seed) for each in (of_pairs, words))
        above_words = datamodeling_score(of_pairs, halves, less=words, seed=seed)
    order = np.argsort(-influence, kind="stable")
    return Blame(
        target=target.name,
        of=target.of,
        value=float(np.mean([one.value for one in found])),
        num_pairs=len(train),
        num_left_out=found[-1].num_left_out,
        num_models=len(found),
        damping=tuple(one.damping for one in found),
        rule=found[-1].rule + (", for the last model" if len(found) > 1 else ""),
        projection_error=max(one.projection_error for one in found),
        validated=validated,
        words_score=of_words,
        above_words=above_words,
        agreement=rank_correlation(influence, by_words),
        groups=tuple(sorted(groups, key=lambda group: -abs(group.total.value))),
        raised=listed(order[:MOST_LISTED][influence[order[:MOST_LISTED]] > 0]),
        lowered=listed(order[::-1][:MOST_LISTED][influence[order[::-1][:MOST_LISTED]] < 0]),
        pair_ids=tuple(pair.pair_id for pair in train),
        influence=influence,
        words=by_words,
    )


def _columns(train: Sequence[PreferencePair], named: Sequence[str] | None) -> dict[str, list[str]]:
    """The group of each pair in each column.

    Raises:
        ConfigError: if a named column has fewer than two groups.
    """
    found = {
        name: [pair.prompt_id if name == "prompt" else str(pair.metadata.get(name, "(none)")) for pair in train]
        for name in (COLUMNS if named is None else named)
    }
    for name, values in found.items() if named is not None else ():
        if len(set(values)) < 2:
            known = sorted({key for pair in train for key in pair.metadata})
            raise ConfigError(
                f"the column '{name}' groups no training pairs, it is '{values[0]}' in all; their columns are "
                f"{', '.join(known) or 'none'}"
            )
    return {name: values for name, values in found.items() if len(set(values)) > 1}


def _described(
    place: int, pair: PreferencePair, influence: np.ndarray, words: np.ndarray, columns: Mapping[str, Sequence[str]]
) -> PairBlame:
    prompt = pair.prompt if isinstance(pair.prompt, str) else pair.prompt[-1].content
    groups = {name: values[place] for name, values in columns.items() if name != "prompt"}
    numbers = float(influence[place]), float(words[place])
    return PairBlame(place + 1, pair.pair_id, *numbers, groups, prompt, str(pair.chosen), str(pair.rejected))


@dataclass(frozen=True)
class _ModelBlame:
    """Influences by one model.

    Args:
        influence: influence of each training pair on the target.
        of_pairs: the same on the margin of each pair of the target; no columns if no model was retrained.
        weights: weights of these margins in the target.
        value: the target.
        damping: as a share of the largest eigenvalue.
        rule: how it was chosen.
        num_left_out: training pairs that are equal after truncation.
        projection_error: see `Blame`.
    """

    influence: Float[np.ndarray, " pairs"]
    of_pairs: Float[np.ndarray, "pairs columns"]
    weights: Float[np.ndarray, " targets"]
    value: float
    damping: float
    rule: str
    num_left_out: int
    projection_error: float


def _of_model(
    model: BradleyTerryRM,
    train: Sequence[PreferencePair],
    target: BlameTarget,
    held_out: Sequence[PreferencePair],
    loss: LossConfig,
    *,
    params: str | Sequence[str],
    damping: float | None,
    folder: Path | None,
    memory: float,
    token_budget: int,
    seed: int,
    on_progress: Callable[[int, int], None],
    is_combined: bool,
) -> _ModelBlame:
    sample = draw_pairs(model, [*train, *target.pairs], None, 0, token_budget=token_budget)
    with measuring(model, sample.batches, loss, params=params, twice=False) as objective:
        places = np.array([index for batch in objective.batches for index in batch.pair_index.tolist()])
        is_train = places < len(train)
        which = "pair of the target" if is_train.all() and target.of != "eigenvector" else "training pair"
        if not is_train.any() or which == "pair of the target":
            raise DataError(f"no {which} is left after truncation to {model.max_length} tokens; raise max_length")
        derivatives = LossDerivatives.of(objective)
        dimension, size = support_of(objective, num_spare=0).dimension, derivatives.size
        num_rows = len(places) * size
        width = min(dimension, int(memory / 4 / num_rows))
        if width < num_rows or 32 * num_rows**2 > memory:  # solved in the columns, in float64
            width = min(width, int(memory / 32 / num_rows))
        require(width > 0, "memory_gib", f"be larger for {num_rows:,} gradients", f"{memory / 2**30:.3g}")
        gradients = _gradients(objective, (num_rows, width), folder, seed, on_progress)
        rows = objective.checked(torch.from_numpy(np.asarray(gradients))).view(len(places), size, width)
    own, aim = derivatives.of_rows(is_train), derivatives.of_rows(~is_train)
    system = DampedSystem(rows[is_train].reshape(-1, width), own.curvature)
    if system.largest <= 0:
        raise DataError("the loss of the training pairs has no curvature at these weights, so influences are undefined")
    rule = "given"
    if damping is None and held_out:
        aside = draw_pairs(model, held_out, None, 0, token_budget=token_budget)
        with measuring(model, aside.batches, loss, params=params, twice=False) as objective:
            wanted = objective.value()
        damping, rule = damping_by_gap(system, own, wanted)
    elif damping is None:
        damping, rule = FALLBACK, "the default, since no held-out pairs were given"
    if target.of == "eigenvector":
        aims, weights, value = system.first_vector, np.ones(1), system.largest / own.weight.sum()
    else:
        aims = rows[~is_train][:, 0] - rows[~is_train][:, 1] if size == 2 else rows[~is_train][:, 0]
        share = aim.weight / aim.weight.sum()
        weights = share if target.of == "margin" else aim.margin_slope / aim.weight.sum()
        value = float(share @ (aim.margin if target.of == "margin" else aim.loss))
    if is_combined and target.pairs:
        aims, combined = torch.from_numpy(weights).to(aims)[None] @ aims, np.ones(1)
    else:
        combined = weights
    change = system.influence(aims, own, damping * system.largest)
    if not np.isfinite(change).all():
        raise DataError("an influence is not finite: the model's weights are broken, or overflow; give another model")
    if target.of == "eigenvector":  # the sign of an eigenvector means nothing
        change *= np.sign(change.sum()) or 1.0
    rows_of, columns = places[is_train], places[~is_train] - len(train)
    influence, by_target = np.zeros(len(train)), np.zeros(len(target.pairs))
    influence[rows_of] = change @ combined
    of_pairs = np.zeros((len(train), 0 if is_combined else len(target.pairs)))
    if not is_combined:
        of_pairs[np.ix_(rows_of, columns)] = change
    if target.pairs:
        by_target[columns] = weights
    error = math.sqrt(2 / width) if width < dimension else 0.0
    num_left_out = len(train) - len(rows_of)
    return _ModelBlame(influence, of_pairs, by_target, float(value), damping, rule, num_left_out, error)


def _gradients(
    objective: PairObjective,
    shape: tuple[int, int],
    folder: Path | None,
    seed: int,
    on_progress: Callable[[int, int], None],
) -> Float[np.ndarray, "rows columns"]:
    """Gradients of all pairs, in memory or in a file from which a stopped call continues.

    The processes of a group share the pairs, and write into one file.
    """
    rank, num_ranks = rank_in_group()
    if folder is None:
        if num_ranks > 1:
            raise ConfigError("several processes need a folder that all of them read, got none")
        rows = np.full(shape, np.nan, np.float32)
    else:
        path = folder / f"gradients-{digest([identity_of(objective), shape, seed])}.npy"
        if rank == 0 and not path.exists():
            with replacing(path) as new:
                empty = np.lib.format.open_memmap(new, "w+", np.float32, shape)
                with new.open("r+b") as file:  # a full disk is an error here, and kills the process below
                    os.posix_fallocate(file.fileno(), 0, new.stat().st_size)
                empty[:] = np.nan
                empty.flush()
        if num_ranks > 1:
            dist.barrier()
        rows = np.lib.format.open_memmap(path, "r+")
    reward_gradients(objective, rows, seed=seed, rank=rank, num_ranks=num_ranks, on_progress=on_progress)
    if num_ranks > 1:
        dist.barrier()
    return rows


def word_influence(
    train: Sequence[PreferencePair],
    targets: Sequence[PreferencePair],
    weights: Float[np.ndarray, " targets"] | None = None,
) -> Float[np.ndarray, "pairs columns"]:
    """Inner products of tf-idf vectors of words, of the chosen response less the rejected one's, times the weight.

    It is what the words of a training pair say of a target's margin without a model: the baseline of an influence.

    Args:
        train: training pairs.
        targets: pairs of the target.
        weights: weights of their margins, for one column; None gives a column for each.
    """
    if not targets:
        return np.zeros((len(train), 1))
    texts = [str(text) for pair in (*train, *targets) for text in (pair.chosen, pair.rejected)]
    vectors = word_vectors(texts, fewest=1)
    differences = vectors[0::2] - vectors[1::2]
    weight = np.array([pair.weight * (2 * pair.label - 1) for pair in train])
    aims = differences[len(train) :] if weights is None else csr_matrix(weights[None]) @ differences[len(train) :]
    return np.asarray((differences[: len(train)] @ aims.T).toarray() * weight[:, None])
