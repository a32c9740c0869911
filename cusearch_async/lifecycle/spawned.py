"""Processes that multiprocessing has spawned from one of ours: vLLM does so with its engine.

Such a process first imports the main module of the one that started it, under the name `__mp_main__`. So every entry
point whose process may start an engine calls `die_with_worker` when it is imported, before all else."""

from __future__ import annotations

import signal
import sys

from cusearch_async.lifecycle.children import die_with_parent


def die_with_worker() -> None:
    """In a spawned process: be killed when the worker ends, however it ends. In any other process: nothing.

    SIGTERM would not end an engine that waits for its dead worker to greet it. SIGHUP is ignored: the worker gives its
    tickets back first, and ends its engine then. Not covered: a worker that ends before its engine has come this far
    (a fraction of a second); vLLM gives up after five minutes."""
    main = sys.modules["__main__"]
    if sys.modules.get("__mp_main__", main) is not main:  # multiprocessing itself makes it another name of `__main__`
        die_with_parent(signal.SIGKILL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
