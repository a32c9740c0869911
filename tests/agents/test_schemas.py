"""Calls that a tool's JSON schema does not allow are the policy's mistakes."""

from __future__ import annotations

import urllib.request
from dataclasses import replace

import pytest

from tests.agents.test_episodes import Scene, parser  # noqa: F401  (a fixture)
from tests.agents.test_rows import request_of, turns_of

TEXT = {"query": {"type": "string"}}
KIND = {"kind": {"enum": ["web", "news"]}}


async def is_mistaken(arguments: str, schema: object) -> bool:
    turns = turns_of(Scene([f'<tool_call>{{"name": "search", "arguments": {arguments}}}</tool_call>']))
    tool = {"type": "function", "function": {"name": "search", "parameters": schema}}
    await turns.ask(replace(request_of("?"), tools=(tool,), max_tokens=200))
    return turns.may_fail


@pytest.mark.parametrize(
    ("arguments", "schema"),
    [
        ('{"query": 3}', {"properties": TEXT}),
        ('{"query": true}', {"properties": {"query": {"type": "integer"}}}),
        ("{}", {"properties": TEXT, "required": ["query"]}),
        ('{"kind": "books"}', {"properties": KIND}),
        ('{"place": {"town": 3}}', {"properties": {"place": {"properties": {"town": {"type": "string"}}}}}),
        ('{"query": "x"}', {"properties": {"query": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}),
        ('["x"]', None),
    ],
)
async def test_what_a_schema_does_not_allow_is_a_mistake(arguments, schema):
    assert await is_mistaken(arguments, schema)


@pytest.mark.parametrize(
    ("arguments", "schema"),
    [
        ('{"query": "x", "kind": "web"}', {"properties": TEXT | KIND, "required": ["query"]}),
        ('{"n": 3.0}', {"properties": {"n": {"type": ["integer", "null"]}}}),
        ("{}", None),
        ("{}", {"required": "query"}),
        ('{"query": 3}', {"properties": {"query": {"type": "txt"}}}),
        ('{"query": 3}', {"properties": {"query": {"pattern": "("}}}),
        ('{"query": 3}', {"properties": {"query": {"$ref": "#/$defs/none"}}}),
        ('{"query": 3}', {"$ref": "#"}),
    ],
)
async def test_what_it_allows_is_none_nor_is_anything_where_it_is_wrong(arguments, schema):
    assert not await is_mistaken(arguments, schema)


async def test_nothing_is_fetched_for_a_schema(monkeypatch):
    """The program may write what the policy has found."""
    fetched = []
    monkeypatch.setattr(urllib.request, "urlopen", lambda request, **_: fetched.append(request))
    assert not await is_mistaken('{"query": 3}', {"properties": {"query": {"$ref": "http://example.invalid/a"}}})
    assert not fetched
