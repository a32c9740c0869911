"""Every module of `make bench` can be loaded: most run for minutes, and in no test."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytestmark = pytest.mark.system
BENCH = Path(__file__).parents[1] / "bench"
OF_TRL = ("trl_case", "trl_lm")
"""In an environment of TRL's."""


@pytest.mark.parametrize("name", sorted({path.stem for path in BENCH.glob("*.py")} - {*OF_TRL, "__init__"}))
def test_a_benchmark_can_be_loaded(name):
    importlib.import_module(f"tests.bench.{name}")
