"""The Lua scripts of the buffer, as they are sent to Redis."""

from __future__ import annotations

from functools import cache
from importlib import resources

_LUA = resources.files("cusearch_async.transport") / "lua"
_SHARED = ("common", "quarantining")
_QUARANTINING = ("recover", "quarantine")
SCRIPTS = sorted({path.name.removesuffix(".lua") for path in _LUA.iterdir()} - {*_SHARED})


@cache
def script(name: str) -> str:
    """The shared code lua/common.lua, and lua/quarantining.lua where it is needed, followed by lua/NAME.lua."""
    parts = (*(_SHARED if name in _QUARANTINING else _SHARED[:1]), name)
    return "".join((_LUA / f"{part}.lua").read_text(encoding="utf-8") for part in parts)
