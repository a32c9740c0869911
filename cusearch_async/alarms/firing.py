"""Where rules fire in the steps of a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cusearch_async.alarms.history import History
from cusearch_async.alarms.rules import RULES, Rule


@dataclass(frozen=True, slots=True)
class Alarm:
    """Steps in a row in which a rule fires."""

    rule: Rule
    first: int
    last: int
    evidence: str
    """Of the last one."""
    is_firing: bool
    """Whether that is the newest step."""


def look_closer(alarm: Alarm, folder: Path) -> str:
    """A command for it, in the run's folder."""
    return alarm.rule.look.format(run=shlex.quote(str(folder)), step=alarm.last)


def alarms_of(rows: Sequence[Mapping[str, Any]], history: History) -> list[Alarm]:
    """All alarms of a run's steps, in order of their first step. `history` may know the steps before."""
    return _found(rows, history, only_firing=False)


def firing_of(rows: Sequence[Mapping[str, Any]], history: History) -> list[Alarm]:
    """Those of `alarms_of` that fire at the newest step; no others are made."""
    return _found(rows, history, only_firing=True)


def _found(rows: Sequence[Mapping[str, Any]], history: History, only_firing: bool) -> list[Alarm]:
    history.follow(rows)
    found = []
    for rule in RULES:
        finding = rule.find(history)
        padded = np.concatenate([[False], finding.fires, [False]])
        edges = np.flatnonzero(padded[1:] != padded[:-1]).reshape(-1, 2)
        for begin, end in edges[-1:].tolist() if only_firing else edges.tolist():
            if end == len(rows) or not only_firing:
                steps = rows[begin]["step"], rows[end - 1]["step"]
                found.append(Alarm(rule, *steps, finding.evidence(end - 1), end == len(rows)))
    return sorted(found, key=lambda alarm: alarm.first)
