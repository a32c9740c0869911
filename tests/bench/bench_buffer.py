"""How fast the buffer is, measured against the same Redis doing the least it could.

    python -m tests.bench.bench_buffer [--seconds 60]

One Redis of its own without AOF (the disk is not what is measured), trajectories of 36 kB, all ratios in one run:
puts against bare pipelined SETs of the same bytes; a claim of 192 out of a small and out of a large backlog; 64
simulated workers that admit, put and beat beside a learner that claims and commits. Figures also go to
runs/bench/buffer.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from cusearch_async.config import RedisConfig
from cusearch_async.lifecycle.children import start_child
from cusearch_async.transport import codec
from cusearch_async.transport.buffer import RedisBuffer
from cusearch_async.transport.connection import Connection
from cusearch_async.transport.interface import RolloutSlot, WorkerStatus
from cusearch_async.transport.limits import RunLimits
from cusearch_async.transport.server import is_listening, server_command
from cusearch_async.types import Trajectory
from tests.conftest import free_port, wait_until
from tests.strategies import make_trajectory

OUTPUT = Path("runs/bench/buffer.json")
SAMPLED = 2_960
"""Sampled tokens that make a payload of 36 kB."""
IN_FLIGHT = 32
WORKERS = 64
ROUNDS = 5


def make_limits(questions: int, max_staleness: int) -> RunLimits:
    return RunLimits(
        questions=questions,
        rollouts=3,
        max_staleness=max_staleness,
        steps=10**6,
        order="ticket",
        s_max=5,
        lease_s=600,
        max_attempts=3,
        limit=10**9,
        limit_bytes=10**12,
        max_tokens=10_000,
    )


class Bench:
    def __init__(self, url: str) -> None:
        self.settings = RedisConfig(url=url)
        self.connection = Connection(self.settings, 10)

    def buffer(self, run: str, questions: int, max_staleness: int) -> RedisBuffer:
        return RedisBuffer(self.connection, run, make_limits(questions, max_staleness))

    @property
    def client(self) -> Any:
        return self.connection.client


def trajectory(slot: RolloutSlot) -> Trajectory:
    rng = np.random.default_rng([slot.ticket, slot.rollout])
    tokens = rng.integers(0, 150_000, SAMPLED + 10, dtype=np.int32)
    logprobs = rng.normal(-1, 0.5, SAMPLED).astype(np.float32)
    return make_trajectory(
        slot.ticket,
        slot.rollout,
        prompt=8,
        sampled=SAMPLED,
        token_ids=tokens,
        logprobs=logprobs,
        depth=int(rng.integers(0, 6)),
    )


async def begin(buffer: RedisBuffer) -> None:
    await buffer.recover(0)
    await buffer.announce(0, "v0-e1")


async def in_parallel(work: Any, items: list[Any], at_once: int) -> float:
    """Seconds to do all, `at_once` at a time."""
    waiting = iter(items)

    async def one() -> None:
        for item in waiting:
            await work(item)

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(at_once)))
    return time.perf_counter() - began


async def puts(bench: Bench, count: int) -> dict[str, float]:
    """Rates of bare pipelined SETs, of puts one after the other and of puts side by side; payloads encoded before."""
    buffer = bench.buffer("puts", count, 1)
    await begin(buffer)
    slots = [slot for _ in range(2) for slot in await buffer.admit("w", 0, 3 * count)][: 2 * count]
    made = [trajectory(slot) for slot in slots]
    payloads = [codec.encode(t) for t in made]

    async def bare_sets(first: int, last: int) -> float:
        """New keys each time, as a put's are."""
        began = time.perf_counter()
        for start in range(first, last, IN_FLIGHT):
            async with bench.client.pipeline(transaction=False) as pipe:
                for number in range(start, min(start + IN_FLIGHT, last)):
                    pipe.set(f"bare:{number}", payloads[number])
                await pipe.execute()
        return (last - first) / (time.perf_counter() - began)

    encoded = {id(t): payload for t, payload in zip(made, payloads, strict=True)}
    encode, codec.encode = codec.encode, lambda t: encoded[id(t)]
    bare, alone, together = 0.0, 0.0, 0.0
    each = count // ROUNDS
    try:
        for number in range(ROUNDS):  # alternating, the best of each: a busy machine slows one round, not one kind
            first, second = 2 * number * each, (2 * number + 1) * each
            bare = max(bare, await bare_sets(first, first + each))
            alone = max(alone, each / await in_parallel(buffer.put, made[first : first + each], 1))
            together = max(together, each / await in_parallel(buffer.put, made[second : second + each], IN_FLIGHT))
    finally:
        codec.encode = encode
    began = time.perf_counter()
    for one in made[:200]:
        codec.encode(one)
    return {
        "payload_bytes": len(payloads[0]),
        "bare_set_per_s": bare,
        "put_alone_per_s": alone,
        "put_together_per_s": together,
        "put_over_bare": together / bare,
        "encode_ms": (time.perf_counter() - began) / 200 * 1000,
    }


async def claims(bench: Bench, backlogs: tuple[int, int], times: int = 15) -> dict[str, float]:
    """Milliseconds to claim a pool of 192 out of each backlog; small payloads, so that 100,000 fit."""
    found: dict[str, float] = {}
    for backlog in backlogs:
        buffer = bench.buffer(f"claim-{backlog}", 64, backlog // 192 + times + 1)
        await begin(buffer)
        slots = []
        while len(slots) < backlog + times * 192:
            slots += await buffer.admit("w", 0, 3000)
        await in_parallel(lambda p, b=buffer: b.put(make_trajectory(p.ticket, p.rollout)), slots, IN_FLIGHT)
        took = []
        for step in range(times):
            began = time.perf_counter()
            pool = await buffer.claim(step)
            took.append(time.perf_counter() - began)
            assert pool is not None
            await buffer.commit(pool, pool.trajectories[:96])
        found[f"claim_ms_of_{backlog}"] = 1000 * float(np.median(took))
        await buffer.reset()
    small, large = (found[f"claim_ms_of_{backlog}"] for backlog in backlogs)
    return found | {"claim_large_over_small": large / small}


async def swarm(bench: Bench, seconds: float) -> dict[str, float]:
    """64 workers on connections of their own and a learner, for a while."""
    learner = bench.buffer("swarm", 64, 2)
    await begin(learner)
    memory_before = int((await bench.client.info("memory"))["used_memory"])
    latencies: list[float] = []
    finished = 0
    end = time.perf_counter() + seconds

    async def work(name: str) -> None:
        nonlocal finished
        connection = Connection(bench.settings, 10)
        buffer = RedisBuffer(connection, "swarm", make_limits(64, 2))
        template = trajectory(RolloutSlot(0, 0))
        while time.perf_counter() < end:
            version = (await buffer.state()).published
            slots = await buffer.admit(name, version, 3)
            for slot in slots:
                one = make_trajectory(
                    slot.ticket,
                    slot.rollout,
                    prompt=8,
                    sampled=SAMPLED,
                    token_ids=template.token_ids,
                    logprobs=template.logprobs,
                    versions=np.full(SAMPLED, version, np.int32),
                    depth=slot.ticket % 6,
                )
                began = time.perf_counter()
                assert await buffer.put(one) == "stored"
                latencies.append(time.perf_counter() - began)
                finished += 1
            await buffer.heartbeat(name, [], WorkerStatus(version=0))
            if not slots:
                await asyncio.sleep(0.01)
        await connection.close()

    most = 0.0

    async def learn() -> int:
        nonlocal most
        step = 0
        while time.perf_counter() < end:
            pool = await learner.claim(step)
            if pool is None:
                await asyncio.sleep(0.005)
                continue
            await learner.commit(pool, pool.trajectories[:96])
            step += 1
            await learner.announce(step, f"v{step}-e1")
            ledger = await learner.ledger()
            held = ledger.buffered + ledger.claimed + 192 * 10
            if step % 10 == 0:
                used = int((await bench.client.info("memory"))["used_memory"]) - memory_before
                most = max(most, used / held)
                await learner.checkpoint(step)
        return step

    steps, *_ = await asyncio.gather(learn(), *(work(f"w{i}") for i in range(WORKERS)))
    ledger = await learner.ledger()
    return {
        "swarm_workers": WORKERS,
        "swarm_seconds": seconds,
        "swarm_puts_per_s": finished / seconds,
        "swarm_put_p50_ms": 1000 * float(np.quantile(latencies, 0.5)),
        "swarm_put_p99_ms": 1000 * float(np.quantile(latencies, 0.99)),
        "swarm_steps": steps,
        "swarm_bytes_per_trajectory": most,
        "swarm_ledger_closes": float(ledger.closes),
    }


async def measure(url: str, seconds: float) -> dict[str, float]:
    bench = Bench(url)
    await puts(bench, 3000)  # Redis takes its memory from the system here, and keeps it
    await bench.client.flushall()
    figures = await puts(bench, 3000)
    await bench.client.flushall()
    figures |= await swarm(bench, seconds)
    await bench.client.flushall()
    figures |= await claims(bench, (1_000, 100_000))
    await bench.connection.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    arguments = parser.parse_args()
    url = f"redis://127.0.0.1:{free_port()}/0"
    with tempfile.TemporaryDirectory() as folder:
        command = [*server_command(url, Path(folder), None), "--appendonly", "no"]
        server = start_child(command, log_file=Path(folder) / "redis.log")
        try:
            wait_until(lambda: is_listening(url), 20)
            figures = asyncio.run(measure(url, arguments.seconds))
        finally:
            server.kill()
            server.wait()
    table = Table(title="the buffer")
    table.add_column("figure")
    table.add_column("", justify="right")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.2f}" if value < 100 else f"{value:,.0f}")
    Console().print(table)
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
