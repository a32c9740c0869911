"""The learner process: build the learner, continue from the newest checkpoint, train."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from cusearch_async import host, run_folder
from cusearch_async.config import Config
from cusearch_async.data.questions import load_questions
from cusearch_async.errors import ConfigError, CusearchError, Fenced, WriteFailed
from cusearch_async.models import check_model
from cusearch_async.training.checkpoint import Checkpoint, Checkpoints, CheckpointState, is_sealed
from cusearch_async.training.heartbeat import BEAT_S, Heartbeat
from cusearch_async.training.learner import Learner
from cusearch_async.training.loop import train
from cusearch_async.training.publishing import state_at
from cusearch_async.training.selecting import before_step_0
from cusearch_async.training.starts import check_same_run, checkpoints_of, record_start, refuse_changes
from cusearch_async.training.team import Team
from cusearch_async.transport.buffer import open_buffer
from cusearch_async.transport.interface import LearnerBuffer
from cusearch_async.transport.origin import origin_of, refuse_another
from cusearch_async.transport.run_contract import RunContract, contract_of
from cusearch_async.transport.weights import WeightStore
from cusearch_async.types import Question

log = logging.getLogger(__name__)


def run(config: Config, accept_changes: bool = False) -> None:
    """One rank of the learner, from start to end of the run. `accept_changes`: settings may differ from those of the
    last start in what the run means."""
    tokenizer = check_model(config.model.location, config.episode.max_tokens)
    team = Team()
    if team.size != config.learner.ranks:
        raise ConfigError(f"learner.ranks = {config.learner.ranks}, but WORLD_SIZE is {team.size}; set them alike")
    questions = load_questions(config.data.source)
    if not team.is_leader:
        follow(config, team)
        return
    run_folder.mark(config.folder, config.run.name)
    contract = contract_of(config, questions, tokenizer)
    with run_folder.hold_as_learner(config.folder):
        lead(team, questions, contract, config, accept_changes)


def lead(
    team: Team, questions: Sequence[Question], contract: RunContract, config: Config, accept_changes: bool
) -> None:
    """Be rank 0."""
    refuse_changes(config, accept_changes, contract)
    if not accept_changes:
        asyncio.run(refuse_another_contract(contract, config))
    checkpoints = checkpoints_of(config)
    newest = asyncio.run(find_checkpoint(checkpoints, config))
    with host.saying(log, f"waiting for {config.model.location} to be loaded"):
        learner = Learner(config, team)
    if newest is not None and not is_sealed(newest.path):  # a learner that is alive has deleted it: it has newer ones
        newest = asyncio.run(find_checkpoint(checkpoints, config))
    team.tell(str(newest.path if newest else "").encode())
    if newest is not None:
        with host.saying(log, f"waiting for {newest.path} to be loaded"):
            learner.load(newest.path)
    start = newest.state if newest else state_at(0, before_step_0(config), config)
    try:
        asyncio.run(_lead(learner, team, checkpoints, start, questions, contract, config, accept_changes))
    finally:
        learner.stop()
    team.close()


def follow(config: Config, team: Team) -> None:
    """Be a rank other than 0. Signals are left to rank 0, which stops the others when it has saved."""
    host.die_with_parent(signal.SIGKILL)
    for number in host.stop_signals():
        signal.signal(number, signal.SIG_IGN)
    learner = Learner(config, team)
    newest = team.listen().decode()
    if newest:
        learner.load(Path(newest))
    learner.follow()
    team.close()


async def refuse_another_contract(contract: RunContract, config: Config) -> None:
    """Before anything large is loaded; `recover` looks again. Raises: BufferUnavailable; ConfigError, also when Redis
    holds another run of this name."""
    async with open_buffer(config, config.run.wait_s, contract=contract) as buffer:
        refuse_another(config.run.name, (await buffer.state()).origin, config.folder)
        await buffer.check_contract()


async def find_checkpoint(checkpoints: Checkpoints, config: Config) -> Checkpoint | None:
    """What to go on from; before anything large is loaded.

    Raises: BufferUnavailable, ConfigError, also when Redis holds another run of this name."""
    async with open_buffer(config, config.run.wait_s) as buffer:
        state = await buffer.state()
    refuse_another(config.run.name, state.origin, config.folder)
    with host.saying(log, "waiting for the newest checkpoint to be verified"):
        newest = checkpoints.newest(state)
    if newest is None:
        log.info("no checkpoint, starting at step 0")
        return None
    check_same_run(newest.path, newest.state, config)
    log.info("resuming from step %d (checkpoint %s)", newest.state.step, newest.path)
    return newest


async def _lead(
    learner: Learner,
    team: Team,
    checkpoints: Checkpoints,
    start: CheckpointState,
    questions: Sequence[Question],
    contract: RunContract,
    config: Config,
    accept_changes: bool,
) -> None:
    stop = host.stop_on_signals()
    store = WeightStore(config.folder / "weights")
    async with open_buffer(config, config.redis.outage_s, stop, learner.vocab_size, contract) as buffer:
        await take_over(buffer, store, checkpoints, start, contract, config, accept_changes)
        try:
            with Heartbeat(config, buffer.epoch, team).beating() as heartbeat:
                await train(learner, buffer, store, checkpoints, start, questions, config, heartbeat, stop)
        except (Fenced, WriteFailed) as error:
            raise await _cause(buffer, error) from error


async def take_over(
    buffer: LearnerBuffer,
    store: WeightStore,
    checkpoints: Checkpoints,
    start: CheckpointState,
    contract: RunContract,
    config: Config,
    accept_changes: bool,
) -> None:
    """Fence off earlier learners, and clear what they left half done."""
    earlier = await buffer.learner()
    least_epoch = max(checkpoints.highest_epoch(), store.highest_epoch())
    await buffer.recover(start.step, start.method, least_epoch, origin_of(config.folder), accept_changes)
    if earlier:
        log.warning(
            "epoch %d takes over from a learner that may be alive (%s, last heard of %s s ago); it will end",
            buffer.epoch,
            _who(earlier),
            earlier["heartbeat_age_s"],
        )
    checkpoints.begin(buffer.epoch, start.step)
    store.begin(buffer.epoch)
    record_start(config, buffer.epoch, start.step, contract)


async def _cause(buffer: LearnerBuffer, error: CusearchError) -> CusearchError:
    """Who has taken over, if one has: it also clears away what an earlier learner is still writing."""
    if isinstance(error, WriteFailed):
        try:
            await buffer.checkpoint(0)
        except CusearchError as fenced:
            error = fenced
    return Fenced(f"{error}{await _successor(buffer)}") if isinstance(error, Fenced) else error


async def _successor(buffer: LearnerBuffer) -> str:
    """Who has taken over, in words, as soon as it says so itself; nothing if it does not."""
    deadline = time.monotonic() + BEAT_S
    while time.monotonic() < deadline:
        facts = await buffer.learner()
        if int(facts.get("epoch", 0)) > buffer.epoch:
            return f" (it is {_who(facts)})"
        await asyncio.sleep(0.05)
    return ""


def _who(learner: dict[str, str]) -> str:
    return f"epoch {learner['epoch']} on {learner['host']}, process {learner['pid']}"
