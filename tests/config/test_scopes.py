"""The scope of a setting is read where the setting is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cusearch_async.cli.config import reference
from cusearch_async.config import Config, Scope, flat, known_keys, load_config, scope_of, section_of


@pytest.mark.parametrize(
    ("key", "scope"),
    [
        ("pool.max_staleness", Scope.SHARED),
        ("learner.lora.rank", Scope.SHARED),
        ("environment.any_label.share", Scope.SHARED),
        ("environment.any_label.source", Scope.MEANING),
        ("environment.any_label.metric", Scope.SHARED),
        ("environment.any_label.a_setting_of_my_environment", Scope.SHARED),
        ("method.phase_reserve", Scope.SHARED),
        ("method.a_setting_of_my_method", Scope.SHARED),
        ("retriever.options.argument.of_my_backend", Scope.SHARED),
        ("model.chat_template.enable_thinking", Scope.SHARED),
        ("loss.clip_low", Scope.MEANING),
        ("rollout.vllm.an_option_that_only_vllm_knows", Scope.MEANING),
        ("gone.in_this_version", Scope.MEANING),
        ("learner.cores", Scope.FREE),
        ("learner.deepspeed.zero_optimization.offload_optimizer.device", Scope.FREE),
    ],
)
def test_the_scope_of_a_key(key, scope):
    assert scope_of(key) is scope


def test_every_key_is_shown_with_its_scope():
    """`cusearch config` shows it, and so does configuration.md (tests/test_docs.py)."""
    lines = reference(None).replace("\n  ", " ")
    shown = dict(re.findall(r"^- `([^`]+)` \(.*?, (shared|meaning|free)\): ", lines, re.MULTILINE))
    sections = {key.rpartition(".")[0] for key in known_keys()}
    assert shown == {key: scope_of(key).value for key in known_keys() if not {key, f"{key}.LABEL"} & sections}


def test_the_settings_of_a_method_of_ones_own_are_shown_as_shared():
    shown = reference(load_config(Path("atlas"), ["--method.name", "docs.examples.methods:FrontierDepth"]))
    assert "- `method.step_size` (`0.05`, shared): " in shown


def test_a_scope_stands_where_it_is_read():
    """Not at a section, and not inside a type: `Free[str] | None` would be MEANING."""
    for name, field, is_section in _fields(Config):
        assert "Scope." not in repr(field.annotation), name
        assert sum(isinstance(item, Scope) for item in field.metadata) <= (not is_section), name


def _fields(kind: type[BaseModel]) -> Iterator[tuple[str, FieldInfo, bool]]:
    for name, field in kind.model_fields.items():
        inner, _ = section_of(field)
        yield name, field, inner is not None
        if inner is not None:
            yield from _fields(inner)


def test_settings_by_their_dotted_keys():
    assert dict(flat({"a": {"b": 1, "c": {"d": [2]}, "e": {}}, "f": None})) == {"a.b": 1, "a.c.d": [2], "f": None}
