"""The result of one check, in one line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "error", "not reachable"]


@dataclass(frozen=True, slots=True)
class Finding:
    status: Status
    what: str
    text: str
