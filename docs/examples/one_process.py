"""A custom transport: a buffer that lives in this process, for tests and trials within it.

    [redis]
    transport = "docs.examples.one_process:open_buffer"

A transport opens an `interface.Buffer`. Its suite is tests/transport/test_interface.py, with the state machine next to
it: add yours to the backends of tests/transport/conftest.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cusearch_async.config import Config
from cusearch_async.run.identity import Identity
from cusearch_async.transport.interface import Buffer
from cusearch_async.transport.limits import limits_of
from cusearch_async.transport.memory import MemoryBuffer
from cusearch_async.transport.memory_run import MemoryRun

RUNS: dict[str, MemoryRun] = {}
"""Run name -> its buffer, while this process lives."""


@asynccontextmanager
async def open_buffer(
    config: Config, patience_s: float, stop: asyncio.Event | None, vocab_size: int | None, identity: Identity
) -> AsyncIterator[Buffer]:
    run = RUNS.setdefault(config.run.name, MemoryRun())
    yield MemoryBuffer(run, limits_of(config, vocab_size), identity)
