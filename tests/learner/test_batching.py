"""Mini-batches, shares of ranks and micro-batches: everything is dealt exactly once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cusearch_async.learner.batching import COST_OF_A_PASS, collate, distinct, micro_batches, minibatches, shares
from tests.strategies import make_trajectory

LENGTHS = st.lists(st.integers(1, 300), max_size=50)


@given(st.lists(st.integers(0, 60), max_size=300), st.integers(1, 64), st.integers(0, 2**32))
def test_minibatches_deal_every_trajectory_once_in_near_equal_parts(tickets, size, seed):
    parts = minibatches(tickets, size, np.random.default_rng(seed))
    assert sorted(np.concatenate(parts).tolist() if parts else []) == list(range(len(tickets)))
    assert len(parts) == (len(tickets) + size - 1) // size
    sizes = {len(part) for part in parts}
    assert max(sizes, default=0) <= size
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


@given(st.lists(st.integers(0, 60), max_size=300), st.integers(1, 64), st.integers(0, 2**32))
def test_rollouts_of_a_ticket_stay_together_except_where_a_part_ends(tickets, size, seed):
    parts = minibatches(tickets, size, np.random.default_rng(seed))
    order = [tickets[index] for part in parts for index in part]
    assert sum(a != b for a, b in itertools.pairwise(order)) == len(set(tickets)) - bool(tickets)


def test_minibatches_are_shuffled_by_the_generator_and_by_nothing_else():
    one, same, other = (
        np.concatenate(minibatches(range(96), 32, np.random.default_rng(s))).tolist() for s in (1, 1, 2)
    )
    assert one == same
    assert one != other
    assert one != list(range(96))


def test_every_ticket_comes_first_equally_often():
    """Three tickets of two rollouts, 600 times."""
    tickets = [0, 0, 1, 1, 2, 2]
    first = [tickets[minibatches(tickets, 2, np.random.default_rng(seed))[0][0]] for seed in range(600)]
    assert all(150 < first.count(ticket) < 250 for ticket in range(3))


def test_the_same_tokens_sampled_at_the_same_places_are_one():
    one = make_trajectory(0, 0, prompt=2, sampled=3)
    again = make_trajectory(0, 1, prompt=2, sampled=3, logprobs=np.full(3, -9, np.float32))
    longer, elsewhere = make_trajectory(0, 2, prompt=2, sampled=4), make_trajectory(0, 3, prompt=3, sampled=2)
    assert len(one.token_ids) == len(elsewhere.token_ids)
    assert one.token_ids.tolist() == elsewhere.token_ids.tolist()
    assert distinct([one, longer, again, elsewhere], [3, 2, 1, 0]) == [[3], [2, 0], [1]]
    assert distinct([one, again], []) == []


@given(LENGTHS, st.integers(1, 8))
def test_ranks_share_a_minibatch_without_overlap(lengths, ranks):
    taken = shares(lengths, ranks)
    assert len(taken) == ranks
    assert sorted(i for share in taken for i in share) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 8))
def test_no_rank_carries_more_than_one_long_trajectory_more_than_another(lengths, ranks):
    loads = [sum(lengths[i] for i in share) for share in shares(lengths, ranks)]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_ranks_are_dealt_by_length():
    assert shares([5, 9, 7, 9], 2) == [[1, 2], [3, 0]]
    assert shares([9, 1, 1, 1, 1, 5], 2) == [[0], [5, 1, 2, 3, 4]]
    assert shares([], 2) == [[], []]


def ragged(rng, count=96):
    """Lengths as of a search agent's episodes: log-normal, of 500 to 5,500 tokens."""
    return [int(length) for length in np.clip(rng.lognormal(7.4, 0.6, count), 500, 5500)]


def test_on_ragged_lengths_ranks_are_even_and_little_is_padded():
    """Four ranks, 16,384 tokens a pass, 32 trajectories a mini-batch, over 50 draws: padding below 5 %, and the slowest
    rank within 5 % of the mean."""
    padded, slowest = [], []
    for seed in range(50):
        lengths = ragged(np.random.default_rng(seed), 32)
        tokens = []
        for share in shares(lengths, 4):
            own = [lengths[i] for i in share]
            groups = micro_batches(own, 16384, packing=False)
            tokens.append(sum(len(group) * max(own[i] for i in group) for group in groups))
        padded.append(sum(tokens) / sum(lengths))
        slowest.append(4 * max(tokens) / sum(tokens))
    assert np.mean(padded) < 1.05
    assert np.mean(slowest) < 1.05


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


def padded_cost(lengths, ends, max_tokens):
    """Padded tokens of falling `lengths` in groups that end at `ends`, and the cost of so many passes."""
    starts = [0, *ends[:-1]]
    return sum(
        (end - start) * lengths[start] + COST_OF_A_PASS * max_tokens for start, end in zip(starts, ends, strict=True)
    )


@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.integers(1, 1500))
def test_no_other_division_of_like_lengths_costs_less(lengths, max_tokens):
    falling = sorted(lengths, reverse=True)
    count, possible = len(lengths), []
    for cuts in itertools.product([False, True], repeat=count - 1):
        ends = [i + 1 for i in range(count - 1) if cuts[i]] + [count]
        starts = [0, *ends[:-1]]
        if all(
            (end - start) * falling[start] <= max_tokens or end - start == 1
            for start, end in zip(starts, ends, strict=True)
        ):
            possible.append(padded_cost(falling, ends, max_tokens))
    ends = list(itertools.accumulate(map(len, micro_batches(lengths, max_tokens, packing=False))))
    assert padded_cost(falling, ends, max_tokens) == pytest.approx(min(possible))


def test_micro_batches_by_hand():
    """At most 12 padded tokens: 6 + 5 padded to 6 fit, a third does not; the 4s and the 2 fit padded to 4, but the 2
    alone costs less."""
    assert micro_batches([4, 6, 2, 5, 4], 12, False) == [[1], [3], [0, 4], [2]]
    assert micro_batches([400, 398, 30], 1024, False) == [[0, 1], [2]]
    assert micro_batches([400, 390, 380], 1280, False) == [[0, 1, 2]]
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


def two(packing):
    return collate([make_trajectory(2, prompt=2, sampled=2), make_trajectory(prompt=1, sampled=2)], packing)


def test_collated_rows_are_padded_on_the_right_and_padding_is_never_sampled():
    batch = two(packing=False)
    assert batch.packed is None
    assert batch.token_ids.tolist() == [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 0]]
    assert mask(batch) == [[0, 0, 1, 0, 0, 1], [0, 1, 0, 0, 1, 0]]
    assert batch.token_ids.dtype == batch.sampled.dtype == torch.int64


def test_packed_trajectories_lie_end_to_end_each_counting_its_own_positions():
    batch = two(packing=True)
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
