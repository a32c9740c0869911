"""How ZeRO divides parameters: every element once, whatever the sizes, ranks and groups."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cusearch_async.learner.divided_state import pieces

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def check(lengths, of_ranks) -> None:
    """Each element of each parameter has one place, and no place has two elements."""
    for number, length in enumerate(lengths):
        held = [range(p.start, p.start + p.length) for p in (of_rank[number] for of_rank in of_ranks)]
        assert [i for part in held for i in part] == list(range(length))
    for of_rank in of_ranks:
        places = [(p.group, i) for p in of_rank for i in range(p.offset, p.offset + p.length)]
        assert len(set(places)) == len(places)


@given(lengths=lengths, ranks=st.integers(1, 5))
def test_zero_1_and_2_cut_all_parameters_together(lengths, ranks):
    share = -(-sum(lengths) // (2 * ranks)) * 2  # DeepSpeed pads to twice the number of ranks
    of_ranks = [pieces(lengths, 1, rank, ranks, [share]) for rank in range(ranks)]
    check(lengths, of_ranks)
    assert all(p.offset + p.length <= share for of_rank in of_ranks for p in of_rank if p.length)


@given(lengths=lengths, ranks=st.integers(1, 5), cuts=st.sets(st.integers(1, 5)))
def test_zero_3_cuts_each_parameter(lengths, ranks, cuts):
    shares = [-(-length // ranks) for length in lengths]
    ends = sorted({cut for cut in cuts if cut < len(lengths)} | {len(lengths)})
    groups = [sum(shares[a:b]) for a, b in itertools.pairwise([0, *ends])]
    of_ranks = [pieces(lengths, 3, rank, ranks, groups) for rank in range(ranks)]
    check(lengths, of_ranks)
    assert all(p.offset + p.length <= groups[p.group] for of_rank in of_ranks for p in of_rank)


def test_by_hand():
    """5 and 4 elements on two ranks: 10 places in all, the last is padding."""
    first, second = (pieces([5, 4], 1, rank, 2, [5]) for rank in range(2))
    assert [(p.start, p.length, p.offset) for p in first] == [(0, 5, 0), (0, 0, 5)]
    assert [(p.start, p.length, p.offset) for p in second] == [(5, 0, 0), (0, 4, 0)]
    first, second = (pieces([5, 4], 3, rank, 2, [3, 2]) for rank in range(2))
    assert [(p.start, p.length, p.group, p.offset) for p in first] == [(0, 3, 0, 0), (0, 2, 1, 0)]
    assert [(p.start, p.length, p.group, p.offset) for p in second] == [(3, 2, 0, 0), (2, 2, 1, 0)]


@pytest.mark.parametrize(("stage", "groups"), [(1, [3]), (1, [100]), (3, [3]), (3, [2, 2])])
def test_parameters_of_another_model_are_noticed(stage, groups):
    with pytest.raises(ValueError, match="elements"):
        pieces([5, 4], stage, 0, 2, groups)
