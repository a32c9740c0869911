"""`cusearch runs fork RUN NEW`: another run that continues from a checkpoint of a run."""

from __future__ import annotations

import argparse
import logging
import re
import shlex
import shutil
from pathlib import Path
from urllib.parse import urlsplit

from cusearch_async.config import overrides_of, saved_in
from cusearch_async.config.section import NAME
from cusearch_async.dashboard.kept import KeptRun
from cusearch_async.errors import ConfigError, WriteFailed
from cusearch_async.files import put_in_place, remove, writing
from cusearch_async.learner.interface import is_sealed
from cusearch_async.lifecycle.children import free_port
from cusearch_async.run import folder as run_folder
from cusearch_async.training.checkpoint import Checkpoints, damage_of
from cusearch_async.transport.server import is_listening

log = logging.getLogger(__name__)


def fork(arguments: argparse.Namespace, _: list[str]) -> None:
    """Raises: ConfigError for a folder or checkpoint that is not there or damaged, or a folder that is in use."""
    run, new = KeptRun.read(arguments.folder), arguments.new
    if not run.settings:
        raise ConfigError(
            f"{run.folder} has no config: a fork that was not launched; fork the run that it is of instead"
        )
    if not re.fullmatch(NAME, new.name):
        raise ConfigError(f"the other run is named like its folder, so {new.name!r} cannot be one; see run.name")
    kept = Checkpoints(run.folder, 1).by_step()
    if not kept:
        raise ConfigError(f"{run.folder} has no checkpoint yet")
    step = max(kept) if arguments.step is None else arguments.step
    if step not in kept:
        raise ConfigError(f"{run.folder} has no checkpoint of step {step}; it has {', '.join(map(str, kept))}")
    checkpoint = kept[step]
    if damaged := checkpoint.damaged():
        raise ConfigError(f"checkpoint {checkpoint.path} is damaged ({', '.join(damaged[:3])}); take another --step")
    run_folder.refuse_others(new, new.name)
    place = new / "checkpoints" / checkpoint.path.name
    if (new / run_folder.STARTS).exists() or any(place.parent.glob("step*")):
        raise ConfigError(f"{new} has begun already, or has a checkpoint; name a new folder")
    run_folder.mark(new, new.name)
    _copy(checkpoint.path, place)
    log.info("%s", shlex.join(command_of_fork(run, new, step)))


def _copy(checkpoint: Path, place: Path) -> None:
    """Raises: ConfigError where a learner has removed it meanwhile, or the copy is damaged; WriteFailed."""
    try:
        with writing(place) as unfinished:
            shutil.copytree(checkpoint, unfinished)
    except WriteFailed:
        if is_sealed(checkpoint):
            raise
        raise ConfigError(f"{checkpoint} was removed meanwhile by the run's learner; fork again") from None
    put_in_place(place)
    if damaged := damage_of(place):
        remove(place)
        raise ConfigError(f"{place} was not what was copied ({', '.join(damaged[:3])}); fork again")


def command_of_fork(run: KeptRun, new: Path, step: int) -> list[str]:
    """What launches it, with other places than `run` for all that two runs must not share."""
    options, steps = {"run.name": new.name, "run.folder": new}, run.setting("run", "steps")
    if step == steps:
        log.info("%s begins at step %d, the last; add --steps N and the settings to try:", new, step)
    else:
        log.info("%s begins at step %d of %s; add the settings to try:", new, step, steps)
        options["run.steps"] = steps
    if run.setting("weights", "folder") != "–":
        options["weights.folder"] = new / "weights"
    for section, key in (("weights", "objects"), ("learner", "checkpoint_objects")):
        if (url := run.setting(section, key)) != "–":
            options[f"{section}.{key}"] = f"{url}/{new.name}"
    if run.setting("weights", "transport") == "http":
        host = urlsplit(str(run.setting("weights", "url"))).hostname or ""
        options["weights.url"] = f"http://{f'[{host}]' if ':' in host else host}:{free_port()}"
    redis = run.setting("redis", "url")
    if (run.folder / "redis").is_dir() and isinstance(redis, str) and is_listening(redis):
        options["redis.url"] = f"redis://127.0.0.1:{free_port()}/0"  # that of the run has another password
    return ["cusearch", "launch", str(next(iter(saved_in(run.folder)))), *overrides_of(options)]
