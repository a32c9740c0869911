"""The result of one check, in one line, and the table of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table
from rich.text import Text

from cusearch_async.errors import ConfigError

Status = Literal["ok", "warning", "error", "not reachable", "too small"]
"""not reachable, too small: on this machine."""
STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "error": "bold red"}
STYLES |= {"not reachable": "cyan", "too small": "yellow"}


@dataclass(frozen=True, slots=True)
class Finding:
    status: Status
    what: str
    text: str


def tried(what: str, check: Callable[[], object], text: str) -> Finding:
    """An error where the check raises a ConfigError."""
    try:
        check()
    except ConfigError as error:
        return Finding("error", what, str(error))
    return Finding("ok", what, text)


def table(findings: Sequence[Finding]) -> Table:
    shown = Table(box=None, pad_edge=False)
    for name in ("", "what", "finding"):
        shown.add_column(name, overflow="fold")
    for finding in findings:
        shown.add_row(Text(finding.status, style=STYLES[finding.status]), Text(finding.what), Text(finding.text))
    return shown
