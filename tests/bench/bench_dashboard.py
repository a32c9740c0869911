"""The page of a run: how long it takes of a long run with a full buffer, and what it takes from a run beside it.

    python -m tests.bench.bench_dashboard

A made-up run has STEPS steps (the rows of a real one, again and again) and a real Redis with BUFFERED trajectories; the
page is asked for ROUNDS times, over HTTP. Then a real run of the demo's config is watched by a client that reads its
news to the end: the CPU seconds of the page's server, start-up left out, over the seconds of the run. All go to
runs/bench/dashboard.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from cusearch_async.cli.parts.fleet import Fleet
from cusearch_async.config import Config, load_config
from cusearch_async.files import append_row
from cusearch_async.metrics.files import read_metrics
from cusearch_async.run import folder as run_folder
from cusearch_async.run.history import record_start
from cusearch_async.transport.buffer import open_buffer
from tests.bench import figures
from tests.conftest import own_services
from tests.strategies import make_trajectory

OUTPUT = Path("runs/bench/dashboard.json")
FOLDER = Path("runs/bench/dashboard")
CONFIG = Path("configs/atlas.toml")
STEPS, BUFFERED, ROUNDS, RUN = 10_000, 100_000, 5, 8
AT_ONCE = 64
"""Trajectories that are put together."""


def config_in(folder: Path, *settings: str) -> Config:
    config = load_config(CONFIG, ["--run.folder", str(folder), *own_services(), *settings])
    run_folder.forget(config.folder)
    return config


def watched_run(steps: int) -> dict[str, float]:
    """A real run, and its page with a client that listens."""
    config = config_in(FOLDER / "run", "--run.steps", str(steps))
    with Fleet(config) as fleet:
        fleet.start_services()
        address = fleet.start_page()
        server = psutil.Process(fleet.children["dashboard"].process.pid)
        fleet.wait(lambda: is_served(address))
        before = sum(server.cpu_times()[:2])
        fleet.start_run()
        began = time.monotonic()
        news = asyncio.run(listen(address, fleet))
        wall = time.monotonic() - began
        spent = sum(server.cpu_times()[:2]) - before
    return {"overhead_share": spent / wall, "server_cpu_s": spent, "run_s": wall, "news": news}


def is_served(address: str) -> bool:
    async def ask() -> bool:
        try:
            async with aiohttp.ClientSession() as session, session.get(address) as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    return asyncio.run(ask())


async def listen(address: str, fleet: Fleet) -> int:
    """How many news came until the run was over."""
    count = 0
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(timeout=timeout, read_bufsize=2**24) as session,
        session.get(f"{address}events?from=0") as stream,
    ):
        while not await asyncio.to_thread(fleet.is_run_over):
            count += (await stream.content.readline()).startswith(b"data: ")
            await asyncio.to_thread(fleet.check)
    return count


def long_run(rows: list[dict[str, Any]], steps: int, buffered: int) -> dict[str, float]:
    staleness = str(-(-buffered // 192) + 2)
    settings = ("--pool.max_staleness", staleness, "--redis.max_trajectories", str(2 * buffered))
    config = config_in(FOLDER / "long", "--run.steps", str(2 * steps), *settings)
    with Fleet(config) as fleet:
        fleet.start_services()
        record_start(config, 1, 0)
        for step in range(steps):
            append_row(config.folder / "metrics.jsonl", rows[step % len(rows)] | {"step": step, "epoch": 1})
        asyncio.run(fill(config, buffered))
        address = fleet.start_page()
        fleet.wait(lambda: is_served(address))
        seconds, size = asyncio.run(pages(address))
    return {"page_s_100k": statistics.median(seconds), "page_mib": size / 2**20}


async def fill(config: Config, count: int) -> None:
    async with open_buffer(config) as buffer:
        await buffer.recover(0)
        await buffer.announce(0, "v000000-e1")
        done = 0
        while done < count:
            slots = await buffer.admit("w", 0, AT_ONCE)
            made = [make_trajectory(slot.ticket, slot.rollout, depth=slot.ticket % 6) for slot in slots]
            await asyncio.gather(*map(buffer.put, made))
            done += len(made)


async def pages(address: str) -> tuple[list[float], int]:
    """Seconds of each, and its bytes. The first one reads the whole file, and does not count."""
    seconds, size = [], 0
    async with aiohttp.ClientSession() as session:
        for _ in range(ROUNDS + 1):
            began = time.monotonic()
            async with session.get(address) as answer:
                size = len(await answer.read())
            seconds.append(time.monotonic() - began)
    return seconds[1:], size


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    found = watched_run(RUN)
    rows = read_metrics(FOLDER / "run" / "metrics.jsonl")
    found |= long_run(rows, STEPS, BUFFERED)
    figures.add(arguments.out, found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
