"""Allocation problems and pools for the tests of SDGA."""

from __future__ import annotations

from hypothesis import strategies as st

from cusearch_async.algorithm.methods.sdga import allocate

K = 96


def filled(capacities, plan):
    return allocate(capacities, plan.targets, plan.priorities)


@st.composite
def problems(draw, deepest=50, largest=60):
    """(capacities, targets, priorities): any target over several buckets, any priorities, ties included."""
    length = draw(st.integers(2, deepest + 1))
    counts = st.lists(st.integers(0, largest), min_size=length, max_size=length)
    ranks = st.lists(st.integers(0, length), min_size=length, max_size=length)
    return draw(counts), draw(counts), draw(st.permutations(range(length)) | ranks)


@st.composite
def pools(draw, deepest=50):
    """(capacities, budget, phase) of a pool that phase k may meet."""
    s_max = draw(st.integers(1, deepest))
    capacities = draw(st.lists(st.integers(0, 60), min_size=s_max + 1, max_size=s_max + 1))
    return capacities, draw(st.integers(1, 200)), draw(st.integers(0, s_max - 1))
