"""Settings of a user's own method or environment are the same in every process of a run."""

from __future__ import annotations

import math
import re
import sys

import pytest

from cusearch_async.config import as_toml, load_config, of_toml
from cusearch_async.errors import ConfigError

LOST = """
from pydantic import Field, SecretStr
from cusearch_async.algorithm.methods import GrpoFull, MethodSettings
from cusearch_async.extensions import Settings


class Inner(Settings):
    limit: int | None = 5


class Knobs(MethodSettings):
    key: SecretStr = SecretStr("")
    inner: Inner = Inner()
    weight: float = Field(0.1, alias="lambda")
    words: frozenset[str] = frozenset()
    none: float = float("nan")


class Mine(GrpoFull):
    Settings = Knobs
"""


@pytest.fixture
def lossy(tmp_path, monkeypatch, write):
    (tmp_path / "lossy_things.py").write_text(LOST, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda text: load_config(write(f'[method]\nname = "lossy_things:Mine"\nbudget = 192\n{text}\n'))
    sys.modules.pop("lossy_things", None)


@pytest.mark.parametrize(
    ("text", "lost"), [("key = 'k'", "key is SecretStr"), ("inner.limit = 'none'", "inner is Inner(limit=None)")]
)
def test_an_own_setting_that_a_saved_config_would_change_is_refused(lossy, text, lost):
    """All processes of a launch had the changed one, and the launch itself, which had checked it, the right one."""
    with pytest.raises(ConfigError, match=rf"lossy_things:Knobs.{re.escape(lost)}.* in a saved config; give it a type"):
        lossy(text)


def test_an_own_setting_is_read_by_its_name_and_a_set_is_written_in_one_order(lossy):
    """One with an alias kept its default, and a set had another order in each process, which was refused then."""
    config = lossy("weight = 0.5\nwords = ['c', 'a', 'b']")
    assert config.method.own.weight == 0.5
    again = of_toml(as_toml(config)).method.own
    assert (again.weight, again.words) == (config.method.own.weight, config.method.own.words)
    assert math.isnan(again.none), "a NaN is the same NaN"
    assert config.model_dump(mode="json")["method"]["words"] == ["a", "b", "c"]
