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
    history.follow(rows)
    found = []
    for rule in RULES:
        finding = rule.find(history)
        padded = np.concatenate([[False], finding.fires, [False]])
        edges = np.flatnonzero(padded[1:] != padded[:-1]).reshape(-1, 2)
        for begin, end in edges.tolist():
            steps = rows[begin]["step"], rows[end - 1]["step"]
            found.append(Alarm(rule, *steps, finding.evidence(end - 1), end == len(rows)))
    return sorted(found, key=lambda alarm: alarm.first)


def firing_of(rows: Sequence[Mapping[str, Any]], history: History) -> list[Alarm]:
    """Those of `alarms_of` that fire at the newest step."""
    history.follow(rows)
    found, last = [], len(rows) - 1
    for rule in RULES:
        finding = rule.find(history)
        if len(finding.fires) and finding.fires[-1]:
            first = last + 1 - int(np.argmin(np.append(finding.fires[::-1], False)))
            found.append(Alarm(rule, rows[first]["step"], rows[last]["step"], finding.evidence(last), True))
    return sorted(found, key=lambda alarm: alarm.first)
