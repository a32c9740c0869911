"""Every start of a run's learner: with which settings and data, by which command, and from where it went on.

    <run folder>/starts/0003.json   a `Start`, of the learner with fencing epoch 3
    <run folder>/starts/0003.toml   the resolved config
    <run folder>/starts/0003.stop   a `Stop`, as JSON, once it has ended; one that was killed leaves none

A resume is the same run, or says what changed: settings of any scope but FREE need --accept-changes, and so do a
question file, a model's config and a tokenizer that changed under the same name. This compares a run with its own
past, in its folder; what its processes must agree on while it runs is in Redis (`run.contract`), and all
of that is refused here too.
"""

from __future__ import annotations

import datetime
import logging
import os
import socket
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from cusearch_async import version
from cusearch_async.config import Config, Scope, flat, load_config, save_config, scope_of
from cusearch_async.errors import ConfigError
from cusearch_async.files import whole_or_absent, write_file
from cusearch_async.run import provenance
from cusearch_async.run.contract import ACCEPT_CHANGES, DATA, MODEL, NO_CONTRACT, SERVED, RunContract
from cusearch_async.run.provenance import Computing

log = logging.getLogger(__name__)

_CHANGED = {DATA: "its questions have", MODEL: "its config or tokenizer has", SERVED: "that has"}
"""What may change while all settings stay the same, and how it is told."""

_STOPPED = ".stop"


class Start(msgspec.Struct):
    epoch: int
    """The learner's fencing epoch."""
    step: int
    """Where it went on from: its checkpoint's step, or 0."""
    time: str
    """ISO 8601, UTC."""
    host: str
    pid: int
    argv: list[str]
    """The learner's own command line."""
    versions: dict[str, str]
    """Of Python and of the packages that are installed."""
    commit: str | None
    """Of the checkout that the code came from, with a + behind it if files were changed; None for an installed one."""
    contract: dict[str, str]
    """The run's contract: key -> text; with the fingerprints of data, model and tokenizer."""
    machine: dict[str, str | int]
    """Processor, cores, memory and GPUs of the learner's machine."""
    launched: list[str]
    """Command line of the launch or demo that started the learner; empty for one that was started by itself."""
    computing: Computing
    weights: str
    """Size and checksum of the weight files of model.path; empty where they cannot be read."""
    corpus: str
    """Checksum of retriever.corpus; empty where that is no file of the learner's machine."""
    nonce: str
    """Of the learner in its buffer."""
    buffer: str
    """Where that buffer was: its address, and the host if that is an address of one host alone."""


class Stop(msgspec.Struct):
    time: str
    """ISO 8601, UTC."""
    step: int | None
    """Steps that were done; None after an error."""
    outcome: str
    """`finished`, `stopped`, or the error in one line."""


def read_starts(run_folder: Path) -> list[Start]:
    """Oldest first; one that cannot be read is named in the log and left out."""
    found = []
    for path in sorted((run_folder / "starts").glob("*.json")):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=Start))
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("%s cannot be read (%s); it is skipped", path, error)
    return found


def read_stop(run_folder: Path, epoch: int) -> Stop | None:
    """How the learner of an epoch ended; None while it runs, and for one that was killed."""
    try:
        return msgspec.json.decode((run_folder / "starts" / f"{epoch:04d}{_STOPPED}").read_bytes(), type=Stop)
    except (OSError, msgspec.MsgspecError):
        return None


def epochs_and_steps(run_folder: Path) -> list[tuple[int, int]]:
    """Which learner went on from where: of what was made later than that, by earlier ones, nothing counts."""
    return [(start.epoch, start.step) for start in read_starts(run_folder)]


def record_start(config: Config, epoch: int, step: int, contract: RunContract = NO_CONTRACT, nonce: str = "") -> None:
    """Keep this start, and make the newest one's settings the run's config.toml. Raises: ConfigError or WriteFailed."""
    started = start_now(config, epoch, step, contract.terms, nonce)
    settings = config.folder / "starts" / f"{epoch:04d}.toml"
    with whole_or_absent(settings):
        save_config(config, settings)
        write_file(settings.with_suffix(".json"), msgspec.json.format(msgspec.json.encode(started)))
        _show_newest(config.folder)


def place_of_buffer(config: Config) -> str:
    """The address of the run's buffer, with this host's name where that means another one on each host."""
    if config.redis.transport != "redis":
        return f"{config.redis.transport} on {socket.gethostname()}"
    parts = urlsplit(config.redis.url)
    place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return f"{place} on {socket.gethostname()}" if parts.hostname in ("127.0.0.1", "::1", "localhost") else place


def start_now(config: Config, epoch: int, step: int, contract: Mapping[str, str], nonce: str) -> Start:
    """A start of this process, in which torch and the model are loaded."""
    return Start(
        epoch=epoch,
        step=step,
        time=_now(),
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
        corpus=provenance.corpus_of(config),
        nonce=nonce,
        buffer=place_of_buffer(config),
    )


def made_otherwise(before: Start, after: Start) -> dict[str, str]:
    """What two starts were made with, where it differs: dotted key -> "was -> is"."""
    return changed_settings(_made_with(before), _made_with(after))


def _made_with(start: Start) -> dict[str, Any]:
    return {
        "package": start.versions,
        "machine": start.machine,
        "computing": msgspec.to_builtins(start.computing),
        "commit": start.commit or "–",
        "content of data.source": start.contract.get(DATA, "–"),
        "content of model.path": start.contract.get(MODEL, "–"),
        "weights of model.path": start.weights or "–",
        "content of retriever.corpus": start.corpus or "–",
    }


def record_stop(config: Config, epoch: int, step: int | None, outcome: str) -> None:
    """Keep how the learner has ended; a disk that takes nothing is only named in the log."""
    path = config.folder / "starts" / f"{epoch:04d}{_STOPPED}"
    try:
        write_file(path, msgspec.json.format(msgspec.json.encode(Stop(_now(), step, outcome))))
    except OSError as error:
        log.warning("%s cannot be written: %s", path, error.strerror)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _show_newest(run_folder: Path) -> None:
    """Make config.toml a copy of the newest start's settings. A learner that has slept since it took over is not the
    newest any more, and may sleep here too: who writes last looks last."""
    shown = None
    while (newest := max(_settings_kept(run_folder), key=_epoch_of)) != shown:
        write_file(run_folder / "config.toml", newest.read_bytes())
        shown = newest


def _settings_kept(run_folder: Path) -> list[Path]:
    return [path for path in (run_folder / "starts").glob("*.toml") if path.stem.isdigit()]


def _epoch_of(settings: Path) -> int:
    return int(settings.stem)


def refuse_changes(config: Config, accept: bool, contract: RunContract = NO_CONTRACT) -> None:
    """Compare with the last start, and log what changed. Raises: as `changes_since_last_start`."""
    for key, change in changes_since_last_start(config, accept, contract).items():
        log.info("since the last start: %s: %s", key, change)


def changes_since_last_start(config: Config, accept: bool, contract: RunContract = NO_CONTRACT) -> dict[str, str]:
    """Dotted key -> what changed: of the settings of the last start, and of what the files held that they name.

    Raises: ConfigError naming what changes what the run means, unless `accept`."""
    last = _last_settings(config.folder)
    if last is None:
        return {}
    changes = changed_settings(last, config.model_dump(mode="json", exclude_none=True))
    known = next((start.contract for start in reversed(read_starts(config.folder)) if start.contract), {})
    for key in _CHANGED.keys() & contract.terms.keys() & known.keys() - changes.keys():
        if known[key] != contract.terms[key]:
            changes[key] = f"{_CHANGED[key]} changed: {known[key]} -> {contract.terms[key]}"
    serious = {key: change for key, change in changes.items() if scope_of(key) is not Scope.FREE}
    if serious and not accept:
        listed = ", ".join(f"{key}: {change}" for key, change in serious.items())
        raise ConfigError(
            f"run {config.run.name!r} would not be the same run: {listed}; choose another run.name, or accept the "
            f"changes with {ACCEPT_CHANGES}"
        )
    return changes


def changed_settings(was: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Dotted key -> "was -> is", of all settings that differ; both as read from TOML."""
    before, after = dict(flat(was)), dict(flat(now))
    keys = [*after, *(key for key in before if key not in after)]
    return {k: f"{_shown(before, k)} -> {_shown(after, k)}" for k in keys if before.get(k) != after.get(k)}


def _last_settings(run_folder: Path) -> dict[str, Any] | None:
    """Of the newest start that can be read; config.toml for a run that has none."""
    for path in (*sorted(_settings_kept(run_folder), key=_epoch_of, reverse=True), run_folder / "config.toml"):
        if not path.exists():
            continue
        try:
            return load_config(path).model_dump(mode="json", exclude_none=True)
        except ConfigError as error:
            log.warning("%s is not a config that can be used now (%s); it is compared as it is", path, error)
        try:
            return tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read (%s); it is not compared", path, error)
    return None


def _shown(settings: Mapping[str, Any], key: str) -> str:
    return repr(settings[key]) if key in settings else "none"
