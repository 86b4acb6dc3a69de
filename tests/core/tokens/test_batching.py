"""Every pair exactly once, never split, within the budget, in an order that is a function of seed and step."""

from __future__ import annotations

import inspect
import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rm_optimizer.core.classifier.tree_masks import tree_mask
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.tokens import plan as packing
from rm_optimizer.core.tokens.batching import (
    AnyPairBatch,
    BatchShape,
    MacroBatch,
    PackedPairBatch,
    PackedPairCollator,
    PairBatch,
    PairCollator,
    PairValues,
    evaluation_batches,
    pair_collator,
)
from rm_optimizer.core.tokens.cache import PairTokens, TokenizedPairs, tokenize_pairs
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.core.tokens.loader import MacroBatches, MacroBatchLoader, create_dataloader
from rm_optimizer.core.tokens.padding import pad_sequences
from rm_optimizer.core.tokens.plan import length_batches, rank_share
from rm_optimizer.errors import DataError, DataStalled
from rm_optimizer.records.orders import PairOrder, epoch_order
from tests.builders import byte_tokenizer

PAD = 0
STORED_ORDER = [3, 2, 1, 6, 0, 7, 4, 5]


def renderer() -> ConversationRenderer:
    return ConversationRenderer(byte_tokenizer(), 100)


def some_pairs(count: int, seed: int = 0) -> list[PreferencePair]:
    draw = np.random.default_rng(seed)
    return [
        PreferencePair(
            f"q{i}",
            "c" * int(draw.integers(1, 60)),
            "r" * int(draw.integers(1, 60)),
            margin=None if i % 3 else float(i),
            label=0.5 + 0.5 * (i % 2),
            weight=1.0 + i % 4,
        )
        for i in range(count)
    ]


@pytest.fixture
def data(tmp_path: Path) -> tuple[TokenizedPairs, list[PreferencePair]]:
    pairs = some_pairs(23)
    pairs.insert(5, PreferencePair("same", "x" * 200 + "a", "x" * 200 + "b"))
    return tokenize_pairs(pairs, renderer(), tmp_path), pairs


def macro_batches(
    data: tuple[TokenizedPairs, list[PreferencePair]],
    *,
    rank: int = 0,
    world_size: int = 1,
    budget: int = 400,
    make: type[PairCollator] = PairCollator,
) -> MacroBatches:
    collator = make(*data, PAD)
    return MacroBatches(collator, BatchShape(8, budget, rank, world_size), seed=3)


def test_an_order_visits_the_pairs_it_names_and_leaves_dropped_ones_out(
    data: tuple[TokenizedPairs, list[PreferencePair]],
):
    orders = [list(range(24))[::-1], list(range(24)), [0] * 22 + [7, 5], [0] * 23 + [24], [0] * 24]
    order = PairOrder("mine", lambda epoch: orders[epoch])
    macro = MacroBatches(PairCollator(*data, PAD), BatchShape(8, 400), seed=3, order=order)
    visited = [int(i) for step in range(6) for i in macro[step].pair_index]
    assert visited == [i for positions in orders[:2] for i in positions if i != 5]
    assert len(visited) == 46
    assert [int(i) for step in range(6, 9) for i in macro[step].pair_index] == [0] * 22 + [7]
    with pytest.raises(ValueError, match=r"positions of order 'mine' must lie in \[0, 24\), got 24 in epoch 3"):
        macro[9]
    with pytest.raises(ValueError, match=r"'mine' must visit 23 pairs an epoch, .* got 24 in epoch 4"):
        macro[12]


def indices(batch: MacroBatch) -> list[int]:
    return [int(i) for micro in batch.micro for i in micro.pair_index]


LENGTHS = st.lists(st.integers(1, 50), max_size=60)


@given(lengths=LENGTHS, budget=st.integers(1, 300))
def test_length_batches_take_each_sequence_once_within_the_budget_longest_first(lengths: list[int], budget: int):
    batches = length_batches(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    flat = [lengths[i] for batch in batches for i in batch]
    assert flat == sorted(lengths, reverse=True)
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget


def micro_batches(lengths: np.ndarray, positions: np.ndarray, token_budget: int) -> list[list[int]]:
    """Micro-batches of pairs of these lengths."""
    tokens = PairTokens(np.zeros(0, np.int32), lengths, np.arange(len(lengths)))
    return PairCollator(tokens, PairValues.of([]), PAD).micro_batches(positions, token_budget)


@given(lengths=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1), budget=st.integers(1, 400))
def test_micro_batches_hold_whole_pairs_within_the_budget(lengths: list[tuple[int, int]], budget: int):
    chosen = list(range(0, len(lengths), 2))
    batches = micro_batches(np.array(lengths), np.array(chosen), budget)
    assert sorted(i for batch in batches for i in batch) == chosen
    for batch in batches:
        assert len(batch) == 1 or 2 * len(batch) * max(max(lengths[i]) for i in batch) <= budget


def test_a_batch_is_full_before_the_next_begins():
    assert length_batches([5] * 7, 15) == [[0, 1, 2], [3, 4, 5], [6]]
    assert micro_batches(np.full((5, 2), 4), np.arange(5), 16) == [[0, 1], [2, 3], [4]]


@given(lengths=st.lists(st.integers(1, 900), min_size=1, max_size=9), budget=st.integers(1, 4000))
def test_no_other_cut_of_the_sorted_sequences_costs_less(lengths: list[int], budget: int):
    def cost(batches: list[list[int]]) -> int:
        return sum(max(batch) * len(batch) + packing.PASS_TOKENS for batch in batches)

    ordered = sorted(lengths, reverse=True)
    cheapest = None
    for cuts in range(2 ** (len(ordered) - 1)):
        ends = [i + 1 for i in range(len(ordered) - 1) if cuts >> i & 1] + [len(ordered)]
        batches = [ordered[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        if all(len(batch) == 1 or len(batch) * batch[0] <= budget for batch in batches):
            cheapest = min(cost(batches), cost(batches) if cheapest is None else cheapest)
    assert cost([[lengths[i] for i in batch] for batch in length_batches(lengths, budget)]) == cheapest


@pytest.mark.parametrize("longest", [3, 40, 900])
@pytest.mark.parametrize("budget", [1, 300, 4000, 10**6])
def test_every_batch_of_many_sequences_is_the_largest_of_the_cheapest(longest: int, budget: int):
    lengths = sorted(np.random.default_rng(longest).integers(1, longest, size=400, endpoint=True).tolist())[::-1]
    sizes, cost = [0] * 400, [0] * 401
    for start in reversed(range(400)):
        most = min(400 - start, max(1, budget // lengths[start]))
        found = [
            (size * lengths[start] + packing.PASS_TOKENS + cost[start + size], -size) for size in range(1, most + 1)
        ]
        cost[start], sizes[start] = min(found)[0], -min(found)[1]
    batches = length_batches(lengths, budget)
    assert [len(batch) for batch in batches] == [sizes[batch[0]] for batch in batches]


def test_no_sequences_make_no_batches():
    assert length_batches([], 10) == []
    assert pad_sequences([], PAD)[0].shape == (0, 0)


def test_a_budget_below_one_is_refused():
    with pytest.raises(ValueError, match="token_budget must be at least 1, got 0"):
        length_batches([1], 0)


def test_padding_stands_on_the_right_and_is_masked():
    ids, mask = pad_sequences([[5, 6, 7], [], [PAD]], pad_token_id=9)
    assert ids.tolist() == [[5, 6, 7], [9, 9, 9], [PAD, 9, 9]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 0], [1, 0, 0]]
    assert ids.dtype == mask.dtype == torch.int64


@settings(max_examples=30)
@given(num=st.integers(1, 200), seed=st.integers(0, 2**32), epoch=st.integers(0, 50))
def test_epoch_order_is_a_permutation_and_a_function_of_seed_and_epoch(num: int, seed: int, epoch: int):
    order = epoch_order(num, seed, epoch)
    assert sorted(order.tolist()) == list(range(num))
    assert np.array_equal(order, epoch_order(num, seed, epoch))


def test_epoch_order_never_changes_between_versions():
    assert epoch_order(8, 0, 0).tolist() == STORED_ORDER
    orders = {tuple(epoch_order(8, seed, epoch).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_epoch_order_is_uniform():
    """Position of element 0 over 4,000 seeds: chi-squared with 4 degrees of freedom is below 23.5 with p = 0.9999."""
    positions = [int(np.flatnonzero(epoch_order(5, seed, 0) == 0)[0]) for seed in range(4000)]
    counts = np.bincount(positions, minlength=5)
    assert ((counts - 800) ** 2 / 800).sum() < 23.5


@given(
    lengths=st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), min_size=1, max_size=40),
    world_size=st.integers(1, 5),
)
def test_rank_shares_are_disjoint_complete_and_within_one_pair_of_balance(
    lengths: list[tuple[int, int]], world_size: int
):
    table = np.array(lengths)
    everyone = np.arange(len(lengths))
    shares = [rank_share(table.sum(axis=1), everyone, rank, world_size) for rank in range(world_size)]
    assert sorted(np.concatenate(shares).tolist()) == everyone.tolist()
    loads = [int(table[share].sum()) for share in shares]
    # LPT: the fullest rank exceeds the emptiest by at most one pair.
    assert max(loads) - min(loads) <= table.sum(axis=1).max()


def test_rows_interleave_chosen_and_rejected_and_carry_each_pairs_numbers(
    data: tuple[TokenizedPairs, list[PreferencePair]],
):
    tokenized, pairs = data
    batch = PairCollator(tokenized, pairs, PAD)([20, 3, 7])
    for row, position in enumerate([20, 3, 7]):
        pair = pairs[int(tokenized.pair_index[position])]
        for side, response in enumerate((pair.chosen, pair.rejected)):
            ids = batch.input_ids[2 * row + side][batch.attention_mask[2 * row + side].bool()]
            assert tuple(ids.tolist()) == renderer().encode(pair.prompt, response).ids
        assert float(batch.margin[row]) == (pair.margin or 0.0)
        assert float(batch.label[row]) == pair.label
        assert float(batch.weight[row]) == pair.weight
        assert pairs[int(batch.pair_index[row])] is pair
    assert [t.dtype for t in (batch.margin, batch.label, batch.weight, batch.pair_index)] == [torch.float32] * 3 + [
        torch.int64
    ]
    assert batch.num_pairs == 3
    assert batch.num_tokens == int(tokenized.lengths[[20, 3, 7]].sum())
    assert batch.num_padded_tokens == 6 * int(tokenized.lengths[[20, 3, 7]].max())


def test_split_gives_the_rewards_of_each_side_and_refuses_other_shapes(
    data: tuple[TokenizedPairs, list[PreferencePair]],
):
    batch = PairCollator(*data, PAD)([0, 1])
    chosen, rejected = batch.split(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert (chosen.tolist(), rejected.tolist()) == ([1.0, 3.0], [2.0, 4.0])
    for shape in ((3,), (4, 1), (2, 2)):
        with pytest.raises(ValueError, match=r"rewards must have shape \(4,\)"):
            inspect.unwrap(PairBatch.split)(batch, torch.zeros(shape))  # without the check of the tests


def test_packed_pairs_carry_the_same_numbers_and_count_shared_tokens_once(
    data: tuple[TokenizedPairs, list[PreferencePair]],
):
    tokenized, _ = data
    positions = [20, 3, 7, 0]
    plain, packed = PairCollator(*data, PAD)(positions), PackedPairCollator(*data, PAD)(positions)
    for name in ("margin", "label", "weight", "pair_index"):
        assert torch.equal(getattr(plain, name), getattr(packed, name))
    assert packed.num_pairs == 4
    assert packed.num_tokens == plain.num_tokens == int(tokenized.lengths[positions].sum())
    shared = 0
    for i in positions:
        pair = zip(tokenized.chosen(i)[:-1].tolist(), tokenized.rejected(i)[:-1].tolist(), strict=False)
        shared += next((k for k, (a, b) in enumerate(pair) if a != b), int(tokenized.lengths[i].min()) - 1)
    assert shared > 0
    assert packed.num_unique_tokens == plain.num_unique_tokens == plain.num_tokens - shared
    assert PackedPairCollator(*data, PAD).tokens(np.array(positions)).sum() == packed.num_unique_tokens
    assert packed.num_unique_tokens <= packed.num_padded_tokens == packed.trees.input_ids.numel()
    chosen, rejected = packed.split(torch.arange(8.0))
    assert (chosen.tolist(), rejected.tolist()) == ([0, 2, 4, 6], [1, 3, 5, 7])
    with pytest.raises(ValueError, match=r"rewards must have shape \(8,\)"):
        packed.split(torch.zeros(4))
    moved = packed.to("meta")
    assert {moved.trees.end.device.type, moved.trees.last.device.type, moved.weight.device.type} == {"meta"}


def test_packed_batches_keep_to_the_budget_unless_a_pair_alone_exceeds_it(
    data: tuple[TokenizedPairs, list[PreferencePair]],
):
    for budget in (1, 150, 400, 10**6):
        for macro in (macro_batches(data, budget=budget, make=PackedPairCollator)[step] for step in range(3)):
            for micro in macro.micro:
                assert micro.num_pairs == 1 or micro.num_padded_tokens <= budget


def test_to_moves_every_tensor(data: tuple[TokenizedPairs, list[PreferencePair]]):
    macro = macro_batches(data)[0].to("meta")
    assert {tensor.device.type for micro in macro.micro for tensor in vars(micro).values()} == {"meta"}
    assert macro.step == 0


def test_an_epoch_visits_every_kept_pair_once_with_a_short_last_batch(
    data: tuple[TokenizedPairs, list[PreferencePair]],
):
    tokenized, _ = data
    batches = macro_batches(data)
    assert batches.steps_per_epoch == 3
    for epoch in (0, 1):
        macros = [batches[3 * epoch + k] for k in range(3)]
        assert [len(indices(macro)) for macro in macros] == [8, 8, 7]
        visited = [i for macro in macros for i in indices(macro)]
        assert sorted(visited) == tokenized.pair_index.tolist()
        assert 5 not in visited
    assert indices(batches[0]) != indices(batches[3])


def test_a_step_is_the_same_whatever_was_asked_before(data: tuple[TokenizedPairs, list[PreferencePair]]):
    one = macro_batches(data)
    forward = [indices(one[step]) for step in range(7)]
    assert [indices(macro_batches(data)[step]) for step in reversed(range(7))] == forward[::-1]


@pytest.mark.parametrize("make", [PairCollator, PackedPairCollator])
@pytest.mark.parametrize("world_size", [2, 3, 10])
@pytest.mark.parametrize("budget", [1, 400, 10**6])
def test_a_macro_batch_holds_the_same_pairs_whatever_ranks_and_budget(
    data: tuple[TokenizedPairs, list[PreferencePair]], world_size: int, budget: int, make: type[PairCollator]
):
    whole = macro_batches(data)
    options = {"world_size": world_size, "budget": budget, "make": make}
    ranks = [macro_batches(data, rank=rank, **options) for rank in range(world_size)]
    for step in range(4):
        shares = [batches[step] for batches in ranks]
        joined = [i for share in shares for i in indices(share)]
        assert sorted(joined) == sorted(indices(whole[step]))
        assert sorted(joined) == sorted(whole[step].pair_index.tolist())
        total = len(joined) * float(whole.collator.weight.mean())
        assert all(share.total_weight == whole[step].total_weight == pytest.approx(total) for share in shares)
    if world_size == 10:
        assert any(not batches[2].micro for batches in ranks)


COLLATORS = pytest.mark.parametrize("make", [PairCollator, PackedPairCollator])


def reward(batch: AnyPairBatch, parameter: Tensor) -> Tensor:
    """A model in one line: the mean embedding of the attended tokens."""
    if isinstance(batch, PackedPairBatch):
        mask, embedded = tree_mask(batch.trees)[:, 0].double(), parameter[batch.trees.input_ids]
        means = torch.einsum("rqk,rk->rq", mask, embedded) / mask.sum(-1)
        return means.flatten()[batch.trees.last]
    mask = batch.attention_mask.double()
    return (parameter[batch.input_ids] * mask).sum(1) / mask.sum(1)


def step_gradient(ranks: Sequence[MacroBatch]) -> Tensor:
    parameter = torch.linspace(-1, 1, 300, dtype=torch.float64).requires_grad_()
    for share in ranks:
        for micro in share.micro:
            chosen, rejected = micro.split(reward(micro, parameter))
            losses = -torch.nn.functional.logsigmoid(chosen - rejected - micro.margin.double())
            (micro.weight.double() @ losses / share.total_weight).backward()
    assert parameter.grad is not None
    return parameter.grad


@COLLATORS
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("budget", [1, 300, 10**6])
def test_the_gradient_of_a_step_depends_on_neither_budget_nor_ranks_nor_sharing(
    data: tuple[TokenizedPairs, list[PreferencePair]], world_size: int, budget: int, make: type[PairCollator]
):
    for step in (0, 2):
        expected = step_gradient([macro_batches(data, budget=10**6)[step]])
        options = {"world_size": world_size, "budget": budget, "make": make}
        ranks = [macro_batches(data, rank=r, **options)[step] for r in range(world_size)]
        torch.testing.assert_close(step_gradient(ranks), expected, rtol=1e-10, atol=1e-14)


def test_evaluation_batches_are_complete_disjoint_long_first_and_alike_for_any_ranks(
    data: tuple[TokenizedPairs, list[PreferencePair]],
):
    tokenized, _ = data
    everything = np.arange(len(tokenized))

    def batches(rank: int, world_size: int) -> list[PairBatch]:
        return list(evaluation_batches(PairCollator(*data, PAD), everything, 500, rank=rank, world_size=world_size))

    alone = batches(0, 1)
    widths = [batch.input_ids.shape[1] for batch in alone]
    assert widths == sorted(widths, reverse=True)
    assert all(batch.num_padded_tokens <= 500 for batch in alone)
    assert sorted(int(i) for batch in alone for i in batch.pair_index) == tokenized.pair_index.tolist()
    shares = [batches(rank, 3) for rank in range(3)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    for rank, share in enumerate(shares):
        for ours, theirs in zip(share, alone[rank::3], strict=True):
            assert torch.equal(ours.input_ids, theirs.input_ids)
            assert torch.equal(ours.pair_index, theirs.pair_index)
    packed = list(evaluation_batches(PackedPairCollator(*data, PAD), everything, 500))
    assert sorted(int(i) for batch in packed for i in batch.pair_index) == tokenized.pair_index.tolist()
    assert all(isinstance(batch, PackedPairBatch) and batch.num_padded_tokens <= 500 for batch in packed)


def run_loader(folder: Path, pairs: list[PreferencePair], steps: range, **options: Any) -> MacroBatchLoader:
    """The loader of a run's steps."""
    tokenized = tokenize_pairs(pairs, renderer(), folder)
    collator = pair_collator(tokenized, pairs, PAD, prefix_sharing=options.pop("prefix_sharing", False))
    loading = {name: options.pop(name, default) for name, default in (("num_workers", 0), ("fetch_timeout", 60.0))}
    shape = BatchShape(**{"batch_size": 4, "micro_token_budget": 300, **options})
    batches = MacroBatches(collator, shape, seed=1)
    return MacroBatchLoader(batches, steps, **loading)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_loader_yields_the_run_and_resumes_it_at_any_step(tmp_path: Path, num_workers: int):
    pairs = some_pairs(10)
    whole = list(run_loader(tmp_path, pairs, range(6)))
    assert [macro.step for macro in whole] == [0, 1, 2, 3, 4, 5]
    resumed = run_loader(tmp_path, pairs, range(2, 6), num_workers=num_workers)
    assert len(resumed) == 4
    for ours, theirs in zip(resumed, whole[2:], strict=True):
        assert ours.step == theirs.step
        assert len(ours.micro) == len(theirs.micro)
        for a, b in zip(ours.micro, theirs.micro, strict=True):
            pairs_of_tensors = zip(vars(a).values(), vars(b).values(), strict=True)
            assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs_of_tensors)


def test_the_loader_shares_prefixes_when_told_to(tmp_path: Path):
    plain = list(run_loader(tmp_path, some_pairs(6), range(2), num_workers=1))
    packed = list(run_loader(tmp_path, some_pairs(6), range(2), num_workers=1, prefix_sharing=True))
    assert [sorted(indices(macro)) for macro in packed] == [sorted(indices(macro)) for macro in plain]
    assert all(isinstance(micro, PackedPairBatch) for macro in packed for micro in macro.micro)
    with pytest.raises(TypeError, match="needs batches without prefix_sharing"):
        packed[0]["chosen_input_ids"]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"rank": 2, "world_size": 2}, r"rank must lie in \[0, 2\), got 2"),
    ],
)
def test_numbers_out_of_range_are_refused(tmp_path: Path, wrong: dict[str, int], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        run_loader(tmp_path, some_pairs(3), range(1), **wrong)


def test_no_pair_left_is_one_sentence(tmp_path: Path):
    same = [PreferencePair("p", "x" * 200 + "a", "x" * 200 + "b")]
    with pytest.raises(DataError, match="no pair is left to train on"):
        create_dataloader(same, renderer(), cache_dir=tmp_path)


@pytest.mark.slow
def test_a_stalled_worker_is_named_instead_of_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    get = MacroBatches.__getitem__

    def stall(self: MacroBatches, step: int) -> MacroBatch:
        if step == 5:
            time.sleep(600)
        return get(self, step)

    monkeypatch.setattr(MacroBatches, "__getitem__", stall)
    loader = run_loader(tmp_path, some_pairs(40), range(2, 10), num_workers=2, fetch_timeout=1.0)
    began = time.monotonic()
    batches = iter(loader)
    assert [next(batches).step for _ in range(3)] == [2, 3, 4]
    with pytest.raises(DataStalled, match=r"worker 1 did not deliver step 5 within 1 s.*data.fetch_timeout"):
        next(batches)
    assert time.monotonic() - began < 200


def test_other_failures_in_a_worker_rise_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(self: MacroBatches, step: int) -> MacroBatch:
        raise RuntimeError("the disk is on fire")

    monkeypatch.setattr(MacroBatches, "__getitem__", fail)
    loader = run_loader(tmp_path, some_pairs(9), range(3), num_workers=1)
    with pytest.raises(RuntimeError, match="the disk is on fire"):
        next(iter(loader))


def test_workers_receive_the_batches_without_the_tokens(data: tuple[TokenizedPairs, list[PreferencePair]]):
    sent = pickle.dumps(macro_batches(data))
    assert b"cccc" not in sent
    assert len(sent) < 3000
    assert indices(pickle.loads(sent)[1]) == indices(macro_batches(data)[1])


def test_a_million_pairs_are_ordered_and_batched_in_seconds():
    lengths = np.random.default_rng(0).integers(1, 500, size=(10**6, 2))
    began = time.process_time()
    order = epoch_order(10**6, 0, 0)
    micro_batches(lengths, order, 16384)
    assert time.process_time() - began < 100
