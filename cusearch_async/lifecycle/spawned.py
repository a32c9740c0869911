"""Processes that multiprocessing spawns from our processes, such as vLLM's engine.

A spawned process first imports the main module of its parent under the name `__mp_main__`. So every entry point whose
process may start an engine calls `die_with_worker` at the top of its module."""

from __future__ import annotations

import signal
import sys


def die_with_worker() -> None:
    """In a spawned process: let the kernel kill this process when the worker ends for any reason. In other processes
    this does nothing.

    SIGTERM would not end an engine that waits for the first message of its dead worker. SIGHUP is ignored: the worker
    first releases its tickets, and then ends its engine. Not covered: a worker that ends in the fraction of a second
    before this call; vLLM then gives up after five minutes."""
    main = sys.modules["__main__"]
    if sys.modules.get("__mp_main__", main) is not main:  # multiprocessing also uses it as an alias of `__main__`
        from cusearch_async.lifecycle.children import die_with_parent  # noqa: PLC0415  (`--help` does not need it)

        die_with_parent(signal.SIGKILL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
