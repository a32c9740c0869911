"""One side of `make bench-rollout`, a process of its own: python rollout_case.py SIDE CASE.json

SIDE `worker` is the rollout worker of the cusearch_async that PYTHONPATH names, of this or an earlier commit: its loop,
runner, engine, search client and Redis buffer. `raw` is `LLM.generate` of vLLM with the turns that a worker has
sampled, its engine in a process of its own as vLLM has it by default; in `raw-one-process` it is in the same. For each
line on its input it samples once, and prints what that took.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil

from cusearch_async.config import Config, load_config
from cusearch_async.lifecycle.placement import configure_process
from cusearch_async.lifecycle.spawned import die_with_worker
from cusearch_async.processes import start

die_with_worker()

POOLS = 2
"""Pools whose episodes are measured: from the end of the first one's to the end of as many more."""


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
    """Says when the first pool's episodes have ended, and when those of all have."""

    def __init__(self, runner: Any, pool: int) -> None:
        self._runner = runner
        self._pool = pool
        self._ended = 0
        self.is_warm, self.is_done = asyncio.Event(), asyncio.Event()

    async def run(self, *what: Any) -> Any:
        trajectory = await self._runner.run(*what)
        self._ended += 1
        if self._ended == self._pool:
            self.is_warm.set()
        if self._ended == self._pool * (1 + POOLS):
            self.is_done.set()
        return trajectory


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
                        await counting.is_warm.wait()
                        clock, before, first = Clock(), engine.sampled_tokens, len(noted)
                        await counting.is_done.wait()
                    spent = clock.read(engine.sampled_tokens - before)
                    stop.set()
                    await working
                if not number:
                    parts = {"before": noted[:first], "measured": noted[first:]}
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


async def raw(config: Config, tokenizer: Any, turns: Path, _: int) -> None:
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
        settings = ends | {"logprobs": 0, "flat_logprobs": True}
        settings |= {"max_tokens": config.episode.max_turn_tokens, "output_kind": RequestOutputKind.FINAL_ONLY}
        llm.reset_prefix_cache()
        for part in ("before", "measured"):  # so that it has what the worker had in its cache
            clock, given = Clock(), parts[part]
            params = [SamplingParams(seed=seed, **settings) for _, seed in given]
            found = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in given], params, use_tqdm=False)
        answer(clock.read(sum(len(output.outputs[0].token_ids) for output in found)))


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
