"""Supervised fine-tuning on demonstrations by the run's own learner.

The policy loss with A = 1, no correction and no KL has the gradient of cross-entropy: r_t = 1 where it is computed, so
the gradient of -a_t r_t A is that of -a_t log π_θ(token t), and with token-mean a_t is one over the policy's tokens of
the batch. What the environment wrote is masked, as in reinforcement learning.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import xxhash
from msgspec.structs import replace

from cusearch_async.config import Config, LossConfig
from cusearch_async.errors import NonFiniteUpdate
from cusearch_async.files import append_row
from cusearch_async.learner.interface import Learner
from cusearch_async.run.folder import METRICS
from cusearch_async.run.history import WEIGHTS
from cusearch_async.run.identity import NOT_SET, loaded_terms
from cusearch_async.run.provenance import weights_of
from cusearch_async.streams import Stream, stream
from cusearch_async.training.checkpoint import Checkpoints, state_at
from cusearch_async.transport.interface import MethodState
from cusearch_async.types import Trajectory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Course:
    """How long and how fast is trained."""

    batch: int
    """Demonstrations per optimizer step."""
    epochs: int
    lr: float
    held_out: float
    """Share of the demonstrations that are not trained on: about as many, of whole questions."""

    def divide(self, demonstrations: Sequence[Trajectory], seed: int) -> tuple[list[Trajectory], list[Trajectory]]:
        """Those to train on, and those held out: of at least one question each if there are two. Questions with more
        demonstrations than may be held out are trained on."""
        order = stream(Stream.DEMONSTRATIONS, seed, 0).permutation(len(demonstrations)).tolist()
        of_question: dict[tuple[str, str], list[Trajectory]] = {}
        for one in (demonstrations[i] for i in order):
            of_question.setdefault((one.environment, one.question), []).append(one)
        wanted, held_out = max(1, round(self.held_out * len(order))), list[Trajectory]()
        for key in list(of_question):
            if len(of_question) > 1 and len(held_out) + len(of_question[key]) <= wanted:
                held_out += of_question.pop(key)
        if len(of_question) > 1 and not held_out:
            held_out += of_question.pop(min(of_question, key=lambda key: len(of_question[key])))
        kept = {id(one) for one in held_out}
        return [one for i in order if id(one := demonstrations[i]) not in kept], held_out

    def steps(self, count: int) -> int:
        """Optimizer steps on `count` demonstrations."""
        return self.epochs * -(-count // self.batch)

    def batch_of(self, step: int, trained: Sequence[Trajectory], seed: int) -> list[Trajectory]:
        """The demonstrations of a step, in an order of each epoch's own."""
        epoch, place = divmod(step, -(-len(trained) // self.batch))
        order = stream(Stream.DEMONSTRATIONS, seed, epoch + 1).permutation(len(trained)).tolist()
        return [trained[i] for i in order[place * self.batch :][: self.batch]]


def tuning_config(config: Config, course: Course, steps: int, folder: Path) -> Config:
    """The config of the warm start before the run of `config`: its model, lengths and learner, another loss."""
    learner = config.learner.model_copy(
        update={"lr": course.lr, "lr_schedule": "linear", "warmup_steps": max(1, steps // 20)}
    )
    loss = LossConfig(minibatch=course.batch, kl_coef=0.0, entropy_coef=0.0, correction="none")
    name = f"{config.run.name}-warmstart"
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"name": name, "folder": folder, "steps": steps}),
            "episode": config.episode.model_copy(update={"temperature": 1.0}),
            "loss": loss,
            "learner": learner,
        }
    )


def terms(course: Course, trained: Sequence[Trajectory], config: Config) -> dict[str, str]:
    """What decides the course of a warm start, as text: one that is continued must agree in all of it."""
    tokens = xxhash.xxh3_64()
    for trajectory in trained:
        tokens.update(trajectory.token_ids.tobytes() + trajectory.sampled.tobytes())
    return {
        **loaded_terms(config),
        "model.path": config.model.path,
        WEIGHTS: weights_of(config.model.location) or NOT_SET,
        "run.seed": str(config.run.seed),
        "learner.weight_decay": str(config.learner.weight_decay),
        "learner.grad_clip": str(config.learner.grad_clip),
        "learner.deepspeed.grad_accum_dtype": str(config.learner.deepspeed.grad_accum_dtype),
        "demonstrations": f"{len(trained)} ({tokens.hexdigest()})",
        **{f"--{name.replace('_', '-')}": str(value) for name, value in asdict(course).items()},
    }


def tune(
    learner: Learner,
    trained: Sequence[Trajectory],
    held_out: Sequence[Trajectory],
    course: Course,
    config: Config,
    checkpoints: Checkpoints,
    start: int,
    is_stopped: Callable[[], bool],
) -> int:
    """Train from step `start` to config.run.steps; returns the steps that are done. Saves a checkpoint every
    learner.checkpoint_every steps, at the end, and where it is stopped."""
    steps, seed, fixed = config.run.steps, config.run.seed, terms(course, trained, config)
    step, saved = start, start
    if step == 0 and held_out:
        log.info("held-out loss %.4f nats per token before", learner.mean_loss(held_out))
    began = time.monotonic()
    while step < steps and not is_stopped():
        batch = course.batch_of(step, trained, seed)
        try:
            metrics = learner.update(batch, np.ones(len(batch)), step)
        except NonFiniteUpdate as error:
            raise NonFiniteUpdate(f"{error}; try an --lr below {course.lr:g}, and another --output") from error
        # μ is recorded as 1, so |log π - log μ| is the cross-entropy
        loss = metrics["off_policy/logprob_difference_mean"]
        row = {
            "step": step,
            "epoch": checkpoints.epoch,
            "loss": loss,
            "lr": metrics["train/lr"],
            "grad_norm": metrics.get("train/grad_norm"),
        }
        append_row(config.folder / METRICS, row)
        step += 1
        left_s = (time.monotonic() - began) / (step - start) * (steps - step)
        log.info("step %d of %d: loss %.4f nats per token, %.0f s left", step, steps, loss, left_s)
        if step % config.learner.checkpoint_every == 0 or step == steps:
            save(learner, checkpoints, step, fixed, config)
            saved = step
    if step > saved:
        save(learner, checkpoints, step, fixed, config)
    if step == steps and held_out:
        log.info("held-out loss %.4f nats per token after", learner.mean_loss(held_out))
    return step


def save(learner: Learner, checkpoints: Checkpoints, step: int, fixed: dict[str, str], config: Config) -> None:
    """Raises: WriteFailed."""
    write = learner.capture(checkpoints.begin_write(step))
    with checkpoints.write(replace(state_at(step, MethodState(), config), fixed=fixed)):
        write()
    checkpoints.finish(step)
    checkpoints.remove(checkpoints.superfluous())
