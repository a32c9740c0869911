"""Checks of what a run reaches from this machine: its addresses, its folder's disk, the Hugging Face Hub."""

from __future__ import annotations

import http.client
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub import constants, try_to_load_from_cache

from cusearch_async.cli.preflight import sizing
from cusearch_async.cli.preflight.finding import Finding
from cusearch_async.cli.preflight.shapes import shape_of
from cusearch_async.cli.preflight.sizing import GIB
from cusearch_async.config import LOOPBACK, Config
from cusearch_async.data.files import HUB, hub_place
from cusearch_async.data.questions import asks_of_atlas
from cusearch_async.errors import ConfigError
from cusearch_async.transport.server import is_listening

ANSWER_S = 2.0
"""Longest wait for an answer of a service or of the Hub."""
KEPT_VERSIONS = 3
"""Weight versions that stay on disk (`transport.weights.WeightStore`)."""
VERSIONS = KEPT_VERSIONS + 1
"""One more is being written."""


# --- addresses ----------------------------------------------------------------------------------------


def addresses(config: Config) -> Iterator[Finding]:
    """Whether each is free, or what answers there."""
    url = config.redis.url
    if config.redis.transport == "redis" and not url.startswith("redis+sentinel://"):
        yield _address("redis.url", url, "Redis", "`cusearch redis CONFIG` there", is_redis(url))
    retriever = config.retriever
    if config.uses_retriever:
        start = "`python -m cusearch_async.processes.start retriever CONFIG` there"
        yield _address("retriever.url", retriever.url, "a web server", start, speaks_http(retriever.url))
        if retriever.backend == "zerosearch":
            yield _simulator(retriever.zerosearch.url, config)
    if config.weights.url is not None:
        yield _weights(config.weights.url)


def _weights(url: str) -> Finding:
    if is_listening(url):
        return Finding(
            "warning", "weights.url", f"something listens at {url}: this run's learner, or choose another port"
        )
    return Finding("ok", "weights.url", f"free: nothing listens at {url} yet, the learner will")


def _address(key: str, url: str, kind: str, start: str, is_right: bool | None) -> Finding:
    """`is_right` is None when nothing listens."""
    if is_right:
        return Finding("ok", key, f"{kind} answers at {url}")
    if is_right is not None:
        return Finding("error", key, f"something else than {kind} listens at {url}: --{key} with a free port")
    if urlsplit(url).hostname in LOOPBACK:
        return Finding("ok", key, f"free: nothing listens at {url} yet, `cusearch launch` starts it")
    return Finding("error", key, f"nothing listens at {url}: {start}")


def _simulator(url: str, config: Config) -> Finding:
    if speaks_http(url) is not None:
        return _address("retriever.zerosearch.url", url, "a web server", "", speaks_http(url))
    if asks_of_atlas(config):
        return Finding("ok", "retriever.zerosearch.url", f"free: `cusearch launch` starts the simulator at {url}")
    text = f"nothing listens at {url}, and `launch` starts no simulator: `vllm serve MODEL --port {urlsplit(url).port}`"
    return Finding("error", "retriever.zerosearch.url", text)


def is_redis(url: str) -> bool | None:
    """Whether a Redis answers, also one that wants a password; None when nothing listens. With TLS it only has to
    listen."""
    if not is_listening(url):
        return None
    parts = urlsplit(url)
    if parts.scheme == "rediss":
        return True
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 6379), timeout=ANSWER_S) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith((b"+PONG", b"-NOAUTH", b"-NOPERM", b"-LOADING", b"-DENIED"))
    except OSError:
        return False


def speaks_http(url: str) -> bool | None:
    """Whether anything answers in HTTP, whatever it answers; None when nothing listens."""
    if not is_listening(url):
        return None
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=ANSWER_S)
    try:
        connection.request("GET", f"{parts.path.rstrip('/')}/health")
        connection.getresponse()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True


# --- disk ---------------------------------------------------------------------------------------------


def disk(config: Config | None) -> Finding:
    """Room for the checkpoints and weight versions that a run keeps, and for one more of each."""
    folder = Path() if config is None else config.folder
    free = shutil.disk_usage(_existing(folder)).free
    text = f"{_size(free)} free for {folder.absolute()}"
    if config is None:
        return Finding("ok", "disk", text)
    shape = shape_of(config.model)
    if shape is None:
        return Finding("warning", "disk", f"{text}; the size of {config.model.path} is not known here: `df -h`")
    stage, dtype, kept = config.learner.zero_stage, config.model.dtype, config.learner.keep_checkpoints + 1
    checkpoint, version = sizing.checkpoint_bytes(shape, dtype, stage), sizing.version_bytes(shape, dtype)
    needed, held = kept * checkpoint, _bytes_in(config.folder / "checkpoints")
    text += f"; {{}} needed for {kept} checkpoints of {_size(checkpoint)}"
    if config.weights.folder is None:
        needed, held = needed + VERSIONS * version, held + _bytes_in(config.weights_folder)
        text += f" and {VERSIONS} weight versions of {_size(version)}"
    text = text.format(_size(needed))
    if free + held < needed:
        return Finding("error", "disk", f"{text}: --run.folder on a larger disk, or --learner.keep_checkpoints 1")
    return Finding("ok", "disk", text)


def weights_disk(config: Config) -> Finding:
    """Room in weights.folder, where the weights have a folder of their own."""
    free = shutil.disk_usage(_existing(config.weights_folder)).free
    text, shape = f"{_size(free)} free for {config.weights_folder.absolute()}", shape_of(config.model)
    if shape is None:
        return Finding("warning", "weights.folder", f"{text}; the size of {config.model.path} is not known here: `df`")
    version = sizing.version_bytes(shape, config.model.dtype)
    text += f"; {_size(VERSIONS * version)} needed for {VERSIONS} weight versions of {_size(version)}"
    if free + _bytes_in(config.weights_folder) < VERSIONS * version:
        return Finding("error", "weights.folder", f"{text}: --weights.folder on a larger disk")
    return Finding("ok", "weights.folder", text)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / (1 << 20):.0f} MiB"


def _bytes_in(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


# --- the Hub ------------------------------------------------------------------------------------------


def hub(config: Config | None) -> Finding:
    """Never an error: what a run needs may be on this machine already."""
    missing = [] if config is None else _missing(config)
    cache = f"cache {constants.HF_HUB_CACHE}"
    if config is not None and not missing:
        return Finding("ok", "Hugging Face Hub", f"not needed: model and data are on this machine ({cache})")
    wanted = f", which has no {' and no '.join(missing)}" if missing else ""
    if constants.HF_HUB_OFFLINE:
        text = f"HF_HUB_OFFLINE is set, only the {cache} is used{wanted}"
        remedy = ": `unset HF_HUB_OFFLINE` for a download" if missing else ""
        return Finding("warning" if missing else "ok", "Hugging Face Hub", text + remedy)
    if not can_connect(constants.ENDPOINT):
        text = (
            f"{constants.ENDPOINT} does not answer; {cache}{wanted}: `hf download` where it does, then HF_HUB_OFFLINE=1"
        )
        return Finding("warning", "Hugging Face Hub", text)
    token = "a token is set" if huggingface_hub.get_token() else "no token (`hf auth login`), gated models need one"
    return Finding("ok", "Hugging Face Hub", f"{constants.ENDPOINT} answers; {token}; {cache}")


def _missing(config: Config) -> list[str]:
    """What of the config comes from the Hub and is not in its local cache."""
    from cusearch_async.models import is_local  # noqa: PLC0415  (transformers only where it is needed)

    model = config.model.location
    found = [] if is_local(model) or Path(model).is_dir() or _is_cached(model) else [model]
    sources = [source for label in config.environment for source in config.sources_of(label)]
    return found + [
        source for source in dict.fromkeys(sources) if source.startswith(HUB) and not _is_cached_file(source)
    ]


def _is_cached(model: str) -> bool:
    return isinstance(try_to_load_from_cache(model, "config.json"), str)


def _is_cached_file(source: str) -> bool:
    try:
        repository, file = hub_place(source, "data.source")
        return isinstance(try_to_load_from_cache(repository, file, repo_type="dataset"), str)
    except (ConfigError, ValueError):  # `cusearch check` says what is wrong with the name
        return False


def can_connect(url: str) -> bool:
    """Whether the host of `url` accepts a connection. Looking a name up has no time limit of its own, hence the
    thread."""
    found = threading.Event()

    def connect() -> None:
        if is_listening(url):
            found.set()

    asking = threading.Thread(target=connect, daemon=True)
    asking.start()
    asking.join(ANSWER_S)
    return found.is_set()
