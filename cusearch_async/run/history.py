"""Every start of a run's learner: its settings and data, its command, and the step that it resumed from.

    <run folder>/starts/0003.json   a `Start`, of the learner with fencing epoch 3
    <run folder>/starts/0003.toml   the resolved config
    <run folder>/starts/0003.stop   a `Stop`, as JSON, once it has ended; one that was killed leaves none

A resume is the same run, or reports its changes: settings of any scope but FREE need --accept-changes, and so do
questions, a model's config, a tokenizer or a corpus that changed under the same name (`run.identity`).
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from cusearch_async import version
from cusearch_async.config import Config, RedisConfig, Scope, is_loopback, load_config, save_config, scope_of
from cusearch_async.config.toml import read_toml
from cusearch_async.errors import ConfigError
from cusearch_async.files import whole_or_absent, write_file
from cusearch_async.run import provenance
from cusearch_async.run.folder import STARTS, now
from cusearch_async.run.identity import (
    DATA,
    MODEL,
    NOBODY,
    NOT_SET,
    SERVED,
    Difference,
    Identity,
    differences,
    not_this_run,
    texts_of,
)
from cusearch_async.run.provenance import Computing

log = logging.getLogger(__name__)

_STOPPED = ".stop"
WEIGHTS = "weights of model.path"


class Start(msgspec.Struct):
    epoch: int
    """The learner's fencing epoch."""
    step: int
    """The step that it resumed from: its checkpoint's, or 0."""
    time: str
    """ISO 8601, UTC."""
    host: str
    pid: int
    argv: list[str]
    """The learner's own command line."""
    versions: dict[str, str]
    """Of Python and of the packages that are installed."""
    commit: str | None
    """`version.commit()`."""
    contract: dict[str, str]
    """The run contract: key -> text; with the fingerprints of data, model and tokenizer."""
    machine: dict[str, str | int]
    """Processor, cores, memory and GPUs of the learner's machine."""
    launched: list[str]
    """Command line of the launch or demo that started the learner; empty without one."""
    computing: Computing
    weights: str
    """Size and checksum of the weight files of model.path; empty where they cannot be read."""
    corpus: str
    """Checksum of retriever.corpus; empty where that is no file of the learner's machine."""
    nonce: str
    """Of the learner in its buffer."""
    buffer: str
    """`place_of_buffer`."""


class Stop(msgspec.Struct):
    time: str
    """ISO 8601, UTC."""
    step: int | None
    """Steps that were done; None after an error."""
    outcome: str
    """`finished`, `stopped`, or the error in one line."""


def read_starts(run_folder: Path) -> list[Start]:
    """Oldest first; one that cannot be read is logged and left out."""
    found = []
    for path in sorted((run_folder / STARTS).glob("*.json")):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=Start))
        except (OSError, msgspec.MsgspecError) as error:
            _name_skipped(path, str(error))
    return found


@functools.cache
def _name_skipped(path: Path, why: str) -> None:
    """Once, however often it is read."""
    log.warning("%s cannot be read (%s); it is skipped", path, why)


def read_stop(run_folder: Path, epoch: int) -> Stop | None:
    """How the learner of an epoch ended; None while it runs, and for one that was killed."""
    try:
        return msgspec.json.decode((run_folder / STARTS / f"{epoch:04d}{_STOPPED}").read_bytes(), type=Stop)
    except (OSError, msgspec.MsgspecError):
        return None


def epochs_and_steps(run_folder: Path) -> list[tuple[int, int]]:
    """Each learner's epoch and first step, for `counts`."""
    return [(start.epoch, start.step) for start in read_starts(run_folder)]


def counts(done: int, epoch: int, starts: Iterable[tuple[int, int]]) -> bool:
    """Whether what the learner of `epoch` left after `done` steps still counts: no later one has gone back behind
    it."""
    return all(later <= epoch or done <= step for later, step in starts)


def record_start(config: Config, epoch: int, step: int, identity: Identity = NOBODY, nonce: str = "") -> None:
    """Keep this start, and make the newest one's settings the run's config.toml. Raises: ConfigError or WriteFailed."""
    started = start_now(config, epoch, step, identity.terms, nonce)
    settings = config.folder / STARTS / f"{epoch:04d}.toml"
    with whole_or_absent(settings):
        save_config(config, settings)
        write_file(settings.with_suffix(".json"), msgspec.json.format(msgspec.json.encode(started)))
        shown = None  # a learner that another has replaced may sleep here: the last one that writes also looks last
        while (newest := _settings_kept(config.folder)[-1]) != shown:
            write_file(config.folder / "config.toml", newest.read_bytes())
            shown = newest


def place_of_buffer(redis: RedisConfig) -> str:
    """The address of the run's buffer, with this host's name where that means another one on each host."""
    is_here = redis.transport != "redis" or is_loopback(redis.url)
    return f"{redis.place} on {socket.gethostname()}" if is_here else redis.place


def start_now(config: Config, epoch: int, step: int, contract: Mapping[str, str], nonce: str) -> Start:
    """A start of this process, in which torch and the model are loaded."""
    return Start(
        epoch=epoch,
        step=step,
        time=now(),
        host=socket.gethostname(),
        pid=os.getpid(),
        argv=sys.argv,
        versions=provenance.versions(),
        commit=version.commit(),
        contract=dict(contract),
        machine=provenance.machine(),
        launched=provenance.launched_by(),
        computing=provenance.computing(config.learner.ranks),
        weights=provenance.weights_of(config.model.location),
        corpus=provenance.corpus_of(config.retriever.corpus) if config.searching else "",
        nonce=nonce,
        buffer=place_of_buffer(config.redis),
    )


def made_otherwise(before: Start, after: Start) -> list[Difference]:
    """The packages, machine, code, data and model of the start `after`, where they differ from those of `before`."""
    return differences(_made_with(after), _made_with(before))


def _made_with(start: Start) -> dict[str, str]:
    computing = msgspec.to_builtins(start.computing)
    return texts_of({"package": start.versions, "machine": start.machine, "computing": computing}) | {
        "commit": start.commit or NOT_SET,
        DATA: start.contract.get(DATA, NOT_SET),
        MODEL: start.contract.get(MODEL, NOT_SET),
        WEIGHTS: start.weights or NOT_SET,
        "content of retriever.corpus": start.corpus or NOT_SET,
    }


def record_stop(run_folder: Path, epoch: int, step: int | None, outcome: str) -> None:
    """Keep how the learner has ended; a failed write is only logged."""
    path = run_folder / STARTS / f"{epoch:04d}{_STOPPED}"
    try:
        write_file(path, msgspec.json.format(msgspec.json.encode(Stop(now(), step, outcome))))
    except OSError as error:
        log.warning("%s cannot be written: %s", path, error.strerror)


def _settings_kept(run_folder: Path) -> list[Path]:
    """Of all starts, oldest first."""
    found = [path for path in (run_folder / STARTS).glob("*.toml") if path.stem.isdigit()]
    return sorted(found, key=lambda path: int(path.stem))


def changes_since_last_start(config: Config, accept: bool, identity: Identity = NOBODY) -> list[Difference]:
    """The settings, and contents of files that they name, that differ from those of the last start.

    Raises: ContractMismatch when one changes the meaning of the run, unless `accept`."""
    last = _last_settings(config.folder)
    if last is None:
        return []
    own, starts = texts_of(config.model_dump(mode="json", exclude_none=True)), read_starts(config.folder)
    contract = starts[-1].contract if starts else {}
    for key in (DATA, MODEL, SERVED):
        if key in identity.terms and key in contract:
            own[key], last[key] = identity.terms[key], contract[key]
    if MODEL in identity.terms and starts and starts[-1].weights and loads_weights_again(config):
        last[WEIGHTS] = starts[-1].weights
        own[WEIGHTS] = provenance.weights_of(config.model.location) or last[WEIGHTS]
    changes = differences(own, last)
    serious = [change for change in changes if scope_of(change.key) is not Scope.FREE]
    if serious and not accept:
        raise not_this_run(config.run.name, serious)
    return changes


def loads_weights_again(config: Config) -> bool:
    """Whether a learner that continues takes more from model.path than a checkpoint replaces: what is not trained, or
    the reference policy."""
    return bool(config.learner.lora.rank or config.learner.trained_layers or config.loss.kl_coef)


def _last_settings(run_folder: Path) -> dict[str, str] | None:
    """Of the newest start that can be read; None without one."""
    for path in reversed(_settings_kept(run_folder)):
        try:
            return texts_of(load_config(path).model_dump(mode="json", exclude_none=True))
        except ConfigError as error:
            log.warning("%s is not a valid config in this version (%s); comparing raw values", path, error)
        try:
            return texts_of(read_toml(path, "config"))
        except (OSError, ConfigError) as error:
            log.warning("%s cannot be read (%s); it is not compared", path, error)
    return None
