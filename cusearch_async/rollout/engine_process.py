"""Loaded by vLLM inside the engine's process: the engine ends when its worker does, also after kill -9."""

from __future__ import annotations

from cusearch_async.host import die_with_parent


class EngineProcess:
    """vLLM's worker extension; it adds nothing to the worker."""


die_with_parent()
