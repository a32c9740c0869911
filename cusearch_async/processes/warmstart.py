"""The learner of a warm start: trains on demonstrations, and leaves a model folder."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from cusearch_async.config import Config, as_toml
from cusearch_async.errors import ConfigError
from cusearch_async.files import put_in_place, remove, writing
from cusearch_async.learner.learner import DeepSpeedLearner
from cusearch_async.learner.ranks import Ranks
from cusearch_async.lifecycle.signals import stop_signals
from cusearch_async.models import check_model
from cusearch_async.processes.learner import follow
from cusearch_async.run import folder as run_folder
from cusearch_async.run.folder import MODEL
from cusearch_async.run.history import WEIGHTS
from cusearch_async.run.identity import NOT_SET, differences
from cusearch_async.training.checkpoint import Checkpoints
from cusearch_async.transport.interface import RunState
from cusearch_async.types import Trajectory
from cusearch_async.warmstart.demonstrations import Read, Sources, read_demonstrations
from cusearch_async.warmstart.tuning import Course, terms, tune, tuning_config

log = logging.getLogger(__name__)

OUTPUT = "--output"
SHOWN = 3
"""Most problems of demonstrations that are logged."""


def run(config: Config, course: Course, sources: Sources, folder: Path) -> bool:
    """Train one rank on demonstrations, until all is done or a signal arrives; whether it is done. The model is then in
    `folder`, where an unfinished warm start is continued. Raises: ConfigError before anything is loaded;
    all errors of training."""
    run_folder.refuse_others(folder, config.run.name, OUTPUT)
    tokenizer = check_model(config.model.location, config.episode.max_tokens)
    read = read_demonstrations(sources, tokenizer, config)
    trained, held_out = course.divide(read.trajectories, config.run.seed)
    ranks = Ranks(config.learner.collective_timeout_s)
    with ranks.meeting():
        if not ranks.is_leader:
            return follow(ranks, lambda given: tuning_config(given, *_listen_to_course(ranks), folder))
        report(read, trained, held_out)
        run_folder.mark(folder, config.run.name, OUTPUT)
        with run_folder.hold(folder):
            return _lead(config, ranks, course, folder, trained, held_out)


def report(read: Read, trained: Sequence[Trajectory], held_out: Sequence[Trajectory]) -> None:
    for problem in read.problems[:SHOWN]:
        log.warning("left out: %s", problem)
    tokens = sum(t.sampled_tokens for t in trained)
    log.info(
        "%d demonstrations (%d of the policy's tokens) to train on, %d held out, %d left out; depth %.2f, EM %.2f, "
        "format %.2f",
        *(len(trained), tokens, len(held_out), len(read.problems)),
        *(float(np.mean([getattr(t, name) for t in read.trajectories])) for name in ("depth", "em", "format_valid")),
    )


def _lead(
    given: Config,
    ranks: Ranks,
    course: Course,
    folder: Path,
    trained: Sequence[Trajectory],
    held_out: Sequence[Trajectory],
) -> bool:
    steps = course.steps(len(trained))
    config = tuning_config(given, course, steps, folder)
    checkpoints = Checkpoints(config.folder, config.learner.keep_checkpoints)
    newest = checkpoints.newest(RunState())
    if newest is not None:
        refuse_another(config.folder, terms(course, trained, config), newest.state.fixed)
    ranks.tell(as_toml(given).encode())  # a config that is read obeys rules of runs that a warm start need not obey
    ranks.tell(msgspec.json.encode((course, steps)))
    learner = DeepSpeedLearner(config, ranks)
    ranks.tell(str(newest.path if newest else "").encode())
    start = 0
    if newest is not None:
        learner.load(newest.path)
        start = newest.state.step
        log.info("continuing from step %d (%s)", start, newest.path)
    checkpoints.begin(checkpoints.highest_epoch() + 1, start)
    stopped = threading.Event()
    for number in stop_signals():
        signal.signal(number, lambda *_: stopped.set())
    step = start
    try:
        asked = (stopped.is_set, ranks.is_asked_to_stop)
        step = tune(learner, trained, held_out, course, config, checkpoints, start, lambda: any(one() for one in asked))
    finally:
        learner.stop(is_finished=step == config.run.steps)
    ranks.close()
    if step < config.run.steps:
        log.info("stopped at step %d of %d; the same command continues", step, config.run.steps)
        return False
    newest = checkpoints.latest()  # it was read back when it was written
    if newest is not None:
        link_model(newest.path / "model", config.folder / MODEL)
    return True


def _listen_to_course(ranks: Ranks) -> tuple[Course, int]:
    """Of rank 0, with its steps: options of this rank's command line may differ."""
    return msgspec.json.decode(ranks.listen(), type=tuple[Course, int])


def refuse_another(folder: Path, own: Mapping[str, str], saved: Mapping[str, str]) -> None:
    """Raises: ConfigError when the folder holds another warm start. Weights count where both are known."""
    known = {key: text for key, text in saved.items() if key in own}
    found = [
        f"{key} was {other}, and is {now}"
        for key, now, other in differences(own, known)
        if key != WEIGHTS or NOT_SET not in (now, other)
    ]
    if found:
        raise ConfigError(f"{folder} holds a warm start of other settings: {', '.join(found)}; choose another --output")


def link_model(source: Path, target: Path) -> None:
    """Give the files of a checkpoint's model a second name, which stays when the checkpoint is deleted."""
    remove(target)
    with writing(target) as unfinished:
        shutil.copytree(source, unfinished, copy_function=os.link)
    put_in_place(target)
