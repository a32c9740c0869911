"""A recorded step replayed: its selection and advantages, by its own method or another one.

Nothing here loads torch, which reads its number of threads when it is loaded; `replay.update` replays the update."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cusearch_async.algorithm.methods import method_class
from cusearch_async.config import Config, LearnerConfig, load_config, with_overrides
from cusearch_async.errors import ConfigError, CorruptPayload, InvalidTrajectory
from cusearch_async.run.folder import STARTS, refuse_no_run
from cusearch_async.run.history import Start, read_starts
from cusearch_async.training.checkpoint import Checkpoints
from cusearch_async.training.recorder import Record, read_record
from cusearch_async.training.selector import advantages_of, candidates_of, select
from cusearch_async.transport.limits import limits_of
from cusearch_async.types import Pool, Trajectory


@dataclass(frozen=True, slots=True)
class Choice:
    """A method's selection from a pool."""

    indices: NDArray[np.int64]  # [K_eff] into the pool
    advantages: NDArray[np.float64]  # [K_eff]

    def is_same(self, other: Choice) -> bool:
        """Bit for bit."""
        return np.array_equal(self.indices, other.indices) and np.array_equal(self.advantages, other.advantages)


@dataclass(frozen=True, slots=True)
class RecordedStep:
    config: Config
    """Of the learner that made the step."""
    start: Start | None
    """Of that learner; None when it cannot be read."""
    record: Record
    pool: Pool

    @classmethod
    def read(cls, run_folder: Path, step: int) -> RecordedStep:
        """Raises: ConfigError, also for a folder that is not a run's."""
        refuse_no_run(run_folder)
        record = read_record(run_folder, step)
        config = load_config(run_folder / STARTS / f"{record.epoch:04d}.toml")
        start = next((start for start in read_starts(run_folder) if start.epoch == record.epoch), None)
        try:
            pool = record.trajectories(config.episode.max_trajectory_tokens)
            for trajectory in pool:
                limits_of(config).check(trajectory)
        except (CorruptPayload, InvalidTrajectory) as error:
            raise ConfigError(f"the record of step {step} in {run_folder} is damaged: {error}") from error
        return cls(config, start, record, pool)

    @property
    def recorded(self) -> Choice:
        return Choice(np.array(self.record.selected, dtype=np.int64), np.array(self.record.advantages))

    def choose(self, config: Config) -> Choice:
        """The choice of `config`'s method from the recorded pool, with the recorded method's memory if that is of the
        same kind, else with none: SDGA-Phase begins at phase 0.

        Raises: ConfigError for a method that would have had another pool, or a record that it cannot choose from."""
        own, recorded = (
            f"{one.questions_per_step} groups of up to {one.largest_group}" for one in (config, self.config)
        )
        if own != recorded:
            raise ConfigError(
                f"{config.method.name} cannot be replayed: it generates {own} rollouts per step, and the pool of step "
                f"{self.record.step} has {recorded}, of {self.config.method.name}; run both methods instead"
            )
        method, of_record = config.method.make(), self.config.method.make()
        try:
            text = self.record.memory if method.Memory is of_record.Memory else ""
            memory = method.decode(text, config.episode.s_max)
            candidates = candidates_of(self.pool, config.episode.s_max)
            selected = select(candidates, self.pool.step, method, memory, config.method, config.run.seed).indices
            return Choice(selected, advantages_of(selected, candidates, self.pool.step, method, config.method).values)
        except (ConfigError, ValueError) as error:
            raise ConfigError(
                f"{config.method.name} cannot choose from the record of step {self.record.step}: {error}; is it of "
                "another run?"
            ) from error

    def selected(self) -> list[Trajectory]:
        return [self.pool.trajectories[i] for i in self.record.selected]


def with_method(config: Config, method: str | None, overrides: list[str]) -> Config:
    """Another method has its settings from `overrides`, those that the config's has too, and its defaults."""
    values = config.model_dump(mode="json", exclude_none=True)
    if method and method != config.method.name:
        own = config.method.own_kind.model_fields.keys() - method_class(method).Settings.model_fields.keys()
        values["method"] = {name: value for name, value in values["method"].items() if name not in own}
        values["method"]["name"] = method
    return with_overrides(values, overrides)


def checkpoint_before(run_folder: Path, step: int, learner: LearnerConfig) -> Path | None:
    """The checkpoint from which a step's update can be replayed; None for the model of the config, at step 0.

    Raises: ConfigError when it is not kept, or damaged, and for an update of several ranks."""
    if learner.ranks > 1:
        raise ConfigError(
            f"the update of step {step} was made by learner.ranks = {learner.ranks}, which add up in another order "
            "than one; replay makes updates of one rank only"
        )
    kept = Checkpoints(run_folder, learner.keep_checkpoints).by_step()
    if step == 0:
        return None
    if step not in kept:
        there = ", ".join(map(str, kept)) or "none"
        raise ConfigError(
            f"the update of step {step} needs the checkpoint of that step, and {run_folder} keeps {there}; a smaller "
            "learner.checkpoint_every and a larger learner.keep_checkpoints keep more"
        )
    damaged = kept[step].damaged()
    if damaged:
        raise ConfigError(f"checkpoint {kept[step].path} is damaged ({', '.join(damaged[:3])})")
    return kept[step].path
