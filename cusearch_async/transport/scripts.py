"""The Lua scripts of the buffer, as they are sent to Redis."""

from __future__ import annotations

from functools import cache
from importlib import resources

SCRIPTS = (
    "admit",
    "put",
    "heartbeat",
    "release",
    "claim",
    "commit",
    "announce",
    "checkpoint",
    "finish",
    "recover",
    "quarantine",
    "reopen",
    "learner",
    "audit",
)
_QUARANTINING = ("recover", "quarantine")


@cache
def script(name: str) -> str:
    """The shared code lua/common.lua, and lua/quarantining.lua where it is needed, followed by lua/NAME.lua."""
    folder = resources.files("cusearch_async.transport") / "lua"
    parts = ("common", *(("quarantining",) if name in _QUARANTINING else ()), name)
    return "".join((folder / f"{part}.lua").read_text(encoding="utf-8") for part in parts)
