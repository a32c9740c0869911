"""A learner that kills itself at one point of a step: python -m tests.system.learner_crashes POINT STEP CONFIG ...

At one of POINTS the process ends by SIGKILL; at `frozen` it stops itself (SIGSTOP) between the last question whether it
is fenced and the renaming of its checkpoint; at `asked` it is asked to stop (SIGTERM) in the middle of an update; at
`full` its disk takes no file of 1 MiB any more from its first checkpoint on; at `none` nothing happens.
Pools come from `feed`, so that no engine is needed and every life of the learner meets the same trajectories."""

from __future__ import annotations

import asyncio
import inspect
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cusearch_async.config import Config, load_config
from cusearch_async.lifecycle.entry import exit_with_one_line, log_to_stderr
from cusearch_async.lifecycle.placement import configure_process
from tests.conftest import SLOW

POINTS = (
    "before claim",
    "after claim",
    "mid-update",
    "after update",
    "after commit",
    "mid-copy",
    "mid-publish",
    "after publish",
    "mid-update, publishing",
    "after capture",
    "mid-checkpoint",
    "mid-update, saving",
    "after checkpoint",
)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def feed(config: Config, steps: int, most: int = 10_000) -> None:
    """Put the pools of the next `steps` steps, and of later ones up to `most` trajectories, which depend on their
    ticket and rollout only."""
    import numpy as np

    from cusearch_async.data.questions import load_run_questions
    from cusearch_async.models import load_tokenizer
    from cusearch_async.run.identity import identity_of
    from cusearch_async.transport.buffer import open_buffer
    from tests.strategies import make_trajectory

    questions = load_run_questions(config)
    question_of = questions.id_of
    identity = identity_of(config, questions.all, load_tokenizer(config.model.location))
    async with open_buffer(config, 30, identity=identity) as buffer:
        async with asyncio.timeout(240 * SLOW):  # a learner that cannot start would be waited for without end
            while (await buffer.state()).published < 0:
                await asyncio.sleep(0.01)
        slots = await buffer.admit("feeder", 0, most)
        assert len(slots) >= steps * config.pool.size
        for slot in slots:
            rng = np.random.default_rng([slot.ticket, slot.rollout])
            sampled = int(rng.integers(5, 40))
            trajectory = make_trajectory(
                slot.ticket,
                slot.rollout,
                question_id=question_of(slot.ticket),
                prompt=8,
                sampled=sampled,
                token_ids=rng.integers(0, 370, sampled + 10).astype(np.int32),
                logprobs=rng.normal(-3, 0.3, sampled).astype(np.float32),
                depth=int(rng.integers(0, 6)),
                reward=float(rng.random()),
            )
            assert await buffer.put(trajectory) == "stored"


def in_the_middle_of_update(step: int, then: Callable[[], None]) -> None:
    """Call `then` after the first optimizer step of learner step `step`."""

    from cusearch_async.learner.learner import DeepSpeedLearner

    mini_batches = {"done": 0}
    accumulate = DeepSpeedLearner._accumulate

    def counted(self: Any, minibatch: Any, update: Any, report: Any) -> None:
        accumulate(self, minibatch, update, report)
        mini_batches["done"] += update.plan.step == step
        if mini_batches["done"] == 2:
            then()

    DeepSpeedLearner._accumulate = counted  # type: ignore[method-assign]


def hanging(is_now: Callable[[Any], bool], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which never returns where `is_now` says so."""

    def hangs(argument: Any, *others: Any) -> Any:
        if is_now(argument):
            threading.Event().wait()
        return function(argument, *others)

    return hangs


def arm(point: str, step: int) -> None:  # noqa: PLR0912, PLR0915  (one branch a point)
    """Make the process kill itself at `point` of learner step `step`."""
    from cusearch_async.learner.learner import DeepSpeedLearner
    from cusearch_async.training.checkpoint import Checkpoints
    from cusearch_async.transport.buffer import RedisBuffer
    from cusearch_async.weights.folder import WeightStore

    def around(owner: Any, name: str, step_of: Callable[..., int], *, before: bool = False) -> None:
        original = getattr(owner, name)

        def dies(*arguments: Any, answer: Any = None) -> None:
            if step_of(*arguments) == step and answer is not False:
                die()

        async def asynchronous(self: Any, *arguments: Any) -> Any:
            if before:
                dies(*arguments)
            answer = await original(self, *arguments)
            dies(*arguments, answer=answer)
            return answer

        def synchronous(self: Any, *arguments: Any) -> Any:
            answer = original(self, *arguments)
            dies(*arguments)
            return answer

        setattr(owner, name, asynchronous if inspect.iscoroutinefunction(original) else synchronous)

    if point == "before claim":
        around(RedisBuffer, "claim", lambda s, *_: s, before=True)
    elif point == "after claim":
        around(RedisBuffer, "_payloads", lambda ids: int(ids[0].split(":")[0]) // 4)
    elif point == "mid-update":
        in_the_middle_of_update(step, die)
    elif point == "mid-update, publishing":  # the version before is copied, and not yet announced
        from cusearch_async.weights import folder as weights

        records_of = weights.records_of
        weights.records_of = hanging(lambda path: f"v{step:06d}" in str(path), records_of)
        in_the_middle_of_update(step, die)
    elif point == "mid-update, saving":  # the newest checkpoint is captured, and not yet written
        from cusearch_async.learner import deepspeed_engine

        deepspeed_engine.write_tensors = hanging(lambda path: True, deepspeed_engine.write_tensors)
        in_the_middle_of_update(step, die)
    elif point == "mid-copy":
        from cusearch_async.weights import folder as weights

        write_tensors = weights.write_tensors

        def write_half(path: Path, tensors: Any) -> None:
            if f"v{step + 1:06d}" in str(path):
                write_tensors(path, dict(list(tensors.items())[: len(tensors) // 2]))
                die()
            write_tensors(path, tensors)

        weights.write_tensors = write_half
    elif point == "after update":
        around(DeepSpeedLearner, "update", lambda selected, advantages, s: s)
    elif point == "after commit":
        around(RedisBuffer, "commit", lambda pool, *_: pool.step)
    elif point == "mid-publish":
        rename = Path.rename

        def torn(self: Path, target: Path) -> Path:
            if self.name.startswith(f".unfinished-v{step + 1:06d}"):
                die()
            return rename(self, target)

        Path.rename = torn  # type: ignore[method-assign]
    elif point == "after publish":
        around(WeightStore, "publish", lambda version, *_: version - 1)
    elif point == "after capture":
        around(DeepSpeedLearner, "capture", lambda folder: int(folder.name.split("-")[1][4:]) - 1)
    elif point == "mid-checkpoint":
        from cusearch_async.learner import deepspeed_engine

        write = deepspeed_engine.write_tensors

        def write_part(path: Path, tensors: Any) -> None:
            is_now = f"step{step + 1:06d}" in str(path)
            write(path, dict(list(tensors.items())[: len(tensors) // 2]) if is_now else tensors)
            if is_now:
                die()

        deepspeed_engine.write_tensors = write_part
    elif point == "frozen":
        finish = Checkpoints.finish

        def freezing(self: Any, finished: int) -> None:
            if finished == step + 1:
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # before this very thread goes on
            finish(self, finished)

        Checkpoints.finish = freezing  # type: ignore[method-assign]
    elif point == "asked":
        update = DeepSpeedLearner._update

        def asked(self: Any, selected: Any, advantages: Any, now: int) -> Any:
            if now == step:
                os.kill(os.getpid(), signal.SIGTERM)
            return update(self, selected, advantages, now)

        DeepSpeedLearner._update = asked  # type: ignore[method-assign]
    elif point == "full":
        capture = DeepSpeedLearner.capture

        def refused(self: Any, folder: Path) -> Any:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
            return capture(self, folder)

        DeepSpeedLearner.capture = refused  # type: ignore[method-assign]
    elif point == "after checkpoint":
        around(Checkpoints, "finish", lambda step: step - 1)


def main() -> None:
    point, step = sys.argv[1], int(sys.argv[2])
    config = load_config(Path(sys.argv[3]), sys.argv[4:])
    log_to_stderr("learner")
    configure_process([])
    if point != "none":
        arm(point, step)
    from cusearch_async.processes import learner

    with exit_with_one_line("learner"):
        learner.run(config)


if __name__ == "__main__":
    main()
