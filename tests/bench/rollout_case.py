"""One side of `make bench-rollout`, a process of its own: python rollout_case.py SIDE CASE.json

SIDE `worker` is the rollout worker of the cusearch_async that PYTHONPATH names, of this or an earlier commit: its loop,
runner, engine, search client and Redis buffer. `raw` is vLLM's `LLMEngine` with the turns that a worker has sampled, as
many at once as the worker has episodes, its engine in a process of its own as vLLM has it by default; in
`raw-one-process` it is in the same. For each line on its input it samples once, and prints what that took.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from cusearch_async.config import Config, load_config
from cusearch_async.lifecycle.placement import configure_process
from cusearch_async.lifecycle.spawned import die_with_worker
from cusearch_async.processes import start

die_with_worker()

POOLS = 2
"""Pools whose episodes are measured: from the end of the first one's to the end of as many more; one pool goes on."""


class Clock:
    """CPU seconds of this process and of its engine's, and wall seconds, since it was made."""

    def __init__(self) -> None:
        self._own, self._engine, self._wall = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        def seconds(process: psutil.Process) -> float:
            times = process.cpu_times()
            return times.user + times.system

        here = psutil.Process()
        return seconds(here), sum(map(seconds, here.children(recursive=True))), time.monotonic()

    def read(self, tokens: int) -> dict[str, float]:
        own, engine, wall = self._now()
        spent = {"own_s": own - self._own, "engine_s": engine - self._engine, "wall_s": wall - self._wall}
        return spent | {"tokens": tokens}


class CountingRunner:
    """Says when the first pool's episodes have ended, when those that are measured have, and when one more pool's."""

    def __init__(self, runner: Any, pool: int) -> None:
        self._runner = runner
        self._pool = pool
        self._ended = 0
        self.is_warm, self.is_done, self.is_over = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def run(self, *what: Any) -> Any:
        trajectory = await self._runner.run(*what)
        self._ended += 1
        if self._ended == self._pool:
            self.is_warm.set()
        if self._ended == self._pool * (1 + POOLS):
            self.is_done.set()
        if self._ended == self._pool * (2 + POOLS):
            self.is_over.set()
        return trajectory


async def reached(event: asyncio.Event, working: asyncio.Task[Any]) -> None:
    """Raises: whatever `working` does before."""
    waiting = asyncio.ensure_future(event.wait())
    await asyncio.wait({waiting, working}, return_when=asyncio.FIRST_COMPLETED)
    if working.done():
        working.result()
        raise RuntimeError("the worker's loop has ended by itself")


def answer(spent: Any) -> None:
    print(json.dumps(spent), file=ANSWERS, flush=True)


async def worker(config: Config, tokenizer: Any, turns: Path, pool: int) -> None:
    from cusearch_async.data.questions import load_run_questions
    from cusearch_async.processes.engines import open_runner
    from cusearch_async.retrieval.client import SearchClient
    from cusearch_async.rollout.loop import RolloutLoop
    from cusearch_async.run.identity import identity_of
    from cusearch_async.transport.buffer import open_buffer

    questions = load_run_questions(config)
    identity = identity_of(config, questions.all, tokenizer)
    async with SearchClient.open(config.retriever, config.episode, config.questions_per_step) as search:
        await search.wait_until_answering(60)
        with open_runner(config, config.model.location, tokenizer, search) as (engine, runner):
            print("ready", file=ANSWERS, flush=True)
            for number, _ in enumerate(sys.stdin):
                run = config.run.model_copy(update={"name": f"bench-{os.getpid()}-{number}"})
                of_round = config.model_copy(update={"run": run})
                async with open_buffer(of_round, identity=identity) as buffer:
                    await buffer.recover(0)
                    await buffer.announce(0, "v000000-e1")
                    await engine._llm.update_weight_version("0")
                    await engine._llm.reset_prefix_cache()
                    engine.version, engine.loaded = 0, "v000000-e1"
                    counting, stop = CountingRunner(runner, pool), asyncio.Event()
                    loop = RolloutLoop("w", of_round, buffer, engine, None, counting, search, questions)
                    with noting(engine) if not number else nullcontext([]) as noted:
                        working = asyncio.create_task(loop.run(stop))
                        await reached(counting.is_warm, working)
                        clock, before, first = Clock(), engine.sampled_tokens, len(noted)
                        await reached(counting.is_done, working)
                        spent, last = clock.read(engine.sampled_tokens - before), len(noted)
                        if not number:
                            await reached(counting.is_over, working)
                    stop.set()
                    await working
                if not number:
                    parts = {"before": noted[:first], "measured": noted[first:last], "after": noted[last:]}
                    await asyncio.to_thread(turns.write_text, json.dumps(parts))
                answer(spent)


@contextmanager
def noting(engine: Any) -> Iterator[list[Any]]:
    """The prompts and seeds of the turns that begin inside."""
    generate, noted = engine.generate, []

    async def generate_and_note(prompt: list[int], most: int, temperature: float, seed: int, stops: Any) -> Any:
        noted.append([list(prompt), seed])
        return await generate(prompt, most, temperature, seed, stops)

    engine.generate = generate_and_note
    try:
        yield noted
    finally:
        engine.generate = generate


async def raw(config: Config, tokenizer: Any, turns: Path, in_flight: int) -> None:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from cusearch_async.environments import SearchEnvironment
    from cusearch_async.rollout.engine import engine_arguments

    ours = ("worker_extension_cls", "scheduler_cls")
    arguments = engine_arguments(config.model.location, config, True)
    llm = LLM(**{name: value for name, value in arguments.items() if name not in ours})
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in SearchEnvironment.stops]
    ends: dict[str, Any] = {"detokenize": False, "stop_token_ids": [first for first, *_ in ids]}
    if any(len(of_text) > 1 for of_text in ids):  # vLLM looks for them in the text then
        ends = {"stop": list(SearchEnvironment.stops), "include_stop_str_in_output": True}
    print("ready", file=ANSWERS, flush=True)
    for _line in sys.stdin:
        parts = json.loads(await asyncio.to_thread(turns.read_text))
        llm.reset_prefix_cache()  # after `before` it has what the worker had in its cache
        settings = ends | {"logprobs": 0, "flat_logprobs": True, "max_tokens": config.episode.max_turn_tokens}
        settings["output_kind"] = RequestOutputKind.FINAL_ONLY
        make = partial(SamplingParams, **settings)
        answer(sample(llm.llm_engine, make, parts, in_flight))


def sample(engine: Any, make: Callable[..., Any], parts: Mapping[str, list[Any]], in_flight: int) -> dict[str, float]:
    """What it takes from the end of as many turns as are before until as many have ended as are measured, with
    `in_flight` at once all the time; `make` makes their parameters."""
    before, measured, after = (parts[name] for name in ("before", "measured", "after"))
    first, last = len(before), len(before) + len(measured)
    waiting = enumerate([*before, *measured, *after])

    def give(count: int) -> None:
        for number, (prompt, seed) in islice(waiting, count):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, make(seed=seed))

    give(in_flight)
    ended, tokens, clock = 0, 0, Clock()
    while ended < last:
        for output in engine.step():
            ended += 1
            tokens += len(output.outputs[0].token_ids)
            if ended == first:
                clock, tokens = Clock(), 0
            give(1)
    spent = clock.read(tokens)
    while engine.has_unfinished_requests():
        engine.step()
    return spent


SIDES: dict[str, Callable[[Config, Any, Path, int], Any]] = {"worker": worker, "raw": raw, "raw-one-process": raw}


def main() -> None:
    side, case = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    config = load_config([Path(name) for name in case["configs"]], case["overrides"])
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if side == "raw" else "0"
    configure_process(config.rollout.cores)
    from cusearch_async.models import check_model

    tokenizer = check_model(config.model.location, config.episode.max_tokens)
    getattr(start, "uvloop", asyncio).run(SIDES[side](config, tokenizer, Path(case["turns"]), case["pool"]))


if __name__ == "__main__":
    ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output
    main()
