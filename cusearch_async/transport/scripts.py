"""The Lua scripts of the buffer, as they are sent to Redis."""

from __future__ import annotations

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


def script(name: str) -> str:
    """The shared code lua/common.lua, followed by lua/NAME.lua."""
    folder = resources.files("cusearch_async.transport") / "lua"
    return "".join((folder / f"{part}.lua").read_text(encoding="utf-8") for part in ("common", name))
