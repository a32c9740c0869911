"""Mini-batches, shares of ranks and micro-batches: everything is dealt exactly once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cusearch_async.training.batching import collate, micro_batches, minibatches, share_of_rank
from tests.strategies import make_trajectory

LENGTHS = st.lists(st.integers(1, 300), max_size=50)


@given(st.integers(0, 300), st.integers(1, 64), st.integers(0, 2**32))
def test_minibatches_deal_every_trajectory_once_in_near_equal_parts(count, size, seed):
    parts = minibatches(count, size, np.random.default_rng(seed))
    assert sorted(np.concatenate(parts).tolist() if parts else []) == list(range(count))
    assert len(parts) == (count + size - 1) // size
    sizes = {len(part) for part in parts}
    assert max(sizes, default=0) <= size
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


def test_a_full_budget_makes_equal_minibatches():
    assert [len(part) for part in minibatches(96, 32, np.random.default_rng(0))] == [32, 32, 32]


def test_minibatches_are_shuffled_by_the_generator_and_by_nothing_else():
    one, same, other = (np.concatenate(minibatches(96, 32, np.random.default_rng(s))).tolist() for s in (1, 1, 2))
    assert one == same
    assert one != other
    assert one != list(range(96))


@given(LENGTHS, st.integers(1, 8))
def test_ranks_share_a_minibatch_without_overlap(lengths, ranks):
    shares = [share_of_rank(lengths, rank, ranks) for rank in range(ranks)]
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


@given(LENGTHS, st.integers(1, 8))
def test_no_rank_carries_more_than_one_long_trajectory_more_than_another(lengths, ranks):
    loads = [sum(lengths[i] for i in share_of_rank(lengths, rank, ranks)) for rank in range(ranks)]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_ranks_are_dealt_by_length():
    assert share_of_rank([5, 9, 7, 9], 0, 2) == [1, 2]
    assert share_of_rank([5, 9, 7, 9], 1, 2) == [3, 0]


@given(LENGTHS, st.integers(1, 1000), st.booleans())
def test_micro_batches_hold_every_trajectory_once_within_the_token_limit(lengths, max_tokens, packing):
    groups = micro_batches(lengths, max_tokens, packing)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        padded = len(group) * max(lengths[i] for i in group)
        tokens = sum(lengths[i] for i in group) if packing else padded
        assert tokens <= max_tokens or len(group) == 1


@given(LENGTHS, st.integers(1, 1000))
def test_packing_never_needs_more_forward_passes_than_padding(lengths, max_tokens):
    assert len(micro_batches(lengths, max_tokens, True)) <= len(micro_batches(lengths, max_tokens, False))


@given(LENGTHS, st.integers(1, 1000), st.booleans())
def test_like_lengths_go_together(lengths, max_tokens, packing):
    dealt = [lengths[i] for group in micro_batches(lengths, max_tokens, packing) for i in group]
    assert dealt == sorted(lengths, reverse=True)


def test_micro_batches_by_hand():
    """At most 12 padded tokens: 6 + 5 padded to 6 fit, a third does not; the 4s and the 2 fit padded to 4."""
    assert micro_batches([4, 6, 2, 5, 4], 12, False) == [[1, 3], [0, 4, 2]]
    assert micro_batches([50], 12, False) == [[0]]
    assert micro_batches([], 12, False) == []


def test_packed_micro_batches_by_hand():
    """At most 15 tokens: 6 + 5 + 4 = 15 fill the first, 4 + 2 are left."""
    assert micro_batches([4, 6, 2, 5, 4], 15, True) == [[1, 3, 0], [4, 2]]


def mask(inputs):
    """1 where a token is sampled, in the shape of the token ids."""
    flags = torch.zeros(inputs.token_ids.numel(), dtype=torch.int64)
    flags[inputs.sampled] = 1
    return flags.reshape(inputs.token_ids.shape).tolist()


def test_collated_rows_are_padded_on_the_right_and_padding_is_never_sampled():
    trajectories = [make_trajectory(prompt=1, sampled=2), make_trajectory(1), make_trajectory(2, prompt=2, sampled=2)]
    batch = collate([trajectories[2], trajectories[0]], packing=False)
    assert batch.packed is None
    assert batch.token_ids.tolist() == [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 0]]
    assert mask(batch) == [[0, 0, 1, 0, 0, 1], [0, 1, 0, 0, 1, 0]]
    assert batch.token_ids.dtype == batch.sampled.dtype == torch.int64


def test_packed_trajectories_lie_end_to_end_each_counting_its_own_positions():
    trajectories = [make_trajectory(prompt=1, sampled=2), make_trajectory(1), make_trajectory(2, prompt=2, sampled=2)]
    batch = collate([trajectories[2], trajectories[0]], packing=True)
    assert batch.token_ids.tolist() == [[5, 6, 7, 8, 9, 10, 5, 6, 7, 8, 9]]
    assert mask(batch) == [[0, 0, 1, 0, 0, 1, 0, 1, 0, 0, 1]]
    assert batch.packed is not None
    assert batch.packed.bounds.tolist() == [0, 6, 11]
    assert batch.packed.lengths == (6, 5)
    assert batch.packed.positions.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6), st.randoms(), st.booleans())
def test_sampled_tokens_in_row_order_are_those_of_each_trajectory_in_turn(shapes, random, packing):
    trajectories = [make_trajectory(i, prompt=prompt, sampled=sampled) for i, (prompt, sampled) in enumerate(shapes)]
    random.shuffle(trajectories)
    batch = collate(trajectories, packing)
    expected = np.concatenate([t.token_ids[t.sampled] for t in trajectories])
    np.testing.assert_array_equal(batch.token_ids.flatten()[batch.sampled].numpy(), expected)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_rank_without_work_gets_an_empty_share(ranks):
    assert share_of_rank([], ranks - 1, ranks) == []
