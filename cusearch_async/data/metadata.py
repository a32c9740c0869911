"""What a row says of its question besides the answers: hops, type, level, decomposition."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cusearch_async.data import columns
from cusearch_async.data.literals import read_literal

_COUNTED = re.compile(r"(?:^|_)(\d{1,2})-?hops?(?![a-z])", re.IGNORECASE)
"""MuSiQue's ids and types: "2hop__494659_5385", "3hop1"."""
_BULKY = ("context", "paragraphs", "evidence_docs")
"""Texts that every process of a run would hold; what is evidence among them is kept as such."""
_TWO_HOPS = ("bridge", "comparison", "compositional", "inference")
"""Types of HotpotQA and 2WikiMultihopQA; its "bridge_comparison" takes four."""


def metadata_of(values: Mapping[str, Any], place: Mapping[str, Any]) -> dict[str, Any]:
    """`metadata`, and the columns that are kept with it; `hops` where the row says in any way how many there are.

    `values` by folded names; `place` is its extra_info."""
    given = read_literal(values.get("metadata"))
    kept = {name: values[name] for name in columns.METADATA if values.get(name) is not None}
    kept |= {name: place[name] for name in columns.HOPS if place.get(name) is not None}
    if isinstance(given, dict):
        kept |= {name: value for name, value in given.items() if value is not None and name not in _BULKY}
    if given is not None and not isinstance(given, dict):
        kept["metadata"] = given
    hops = _hops(kept, values)
    return kept | {"hops": hops} if hops is not None else kept


def _hops(kept: Mapping[str, Any], values: Mapping[str, Any]) -> int | None:
    for name in columns.HOPS:
        if (count := _number(kept.get(name))) is not None:
            return count
    ids = (str(values[name]) for name in columns.IDS if isinstance(values.get(name), str))
    for text in (*ids, str(kept.get("type"))):
        if found := _COUNTED.search(text):
            return int(found[1])
    for name in ("question_decomposition", "decomposition"):
        steps = read_literal(kept.get(name))
        if isinstance(steps, list) and steps:
            return len(steps)
    if values.get("supporting_facts") is None and kept.get("supporting_facts") is None:
        return None
    return 4 if kept.get("type") == "bridge_comparison" else 2 if kept.get("type") in _TWO_HOPS else None


def _number(value: Any) -> int | None:
    """3, 3.0, "3" and "3hop" -> 3."""
    if isinstance(value, bool):
        return None
    found = re.fullmatch(r"(\d{1,2})(?:\.0)?(?:[ -]?hops?)?", str(value).strip())
    return int(found[1]) if found else None
