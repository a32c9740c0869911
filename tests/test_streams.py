"""Random streams: each its own, each a function of what it is named by."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

import cusearch_async
from cusearch_async.streams import Stream, draw_number, stream

numbers = st.lists(st.integers(0, 2**40), max_size=3)


@given(name=st.sampled_from(Stream), seed=st.integers(0, 2**40), numbers=numbers)
def test_a_stream_is_a_function_of_its_name_seed_and_numbers(name, seed, numbers):
    first, second = (stream(name, seed, *numbers).integers(2**63, size=4).tolist() for _ in range(2))
    assert first == second
    assert draw_number(name, seed, *numbers) == draw_number(name, seed, *numbers) < 2**32


def test_no_two_streams_coincide():
    """[seed, epoch] and [seed, step, 0] were one stream: NumPy pads seeds with zeros."""
    ends = [*itertools.product(range(3), repeat=1), *itertools.product(range(3), repeat=2), ()]
    of_seeds = itertools.product((0, 7, 2**32, 2**32 + 7), Stream, ends)
    drawn = [stream(name, seed, *end).integers(2**63) for seed, name, end in of_seeds]
    assert len(set(drawn)) == len(drawn)


def test_nothing_else_of_the_package_makes_a_generator_of_numpy():
    root = Path(cusearch_async.__file__).parent
    made = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in {"default_rng", "SeedSequence", "RandomState"}
    }
    assert made == {"streams.py"}
