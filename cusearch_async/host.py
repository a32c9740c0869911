"""What a process of a run is before it is anything else: its arguments, cores, signals, ranks and last words.

Imports nothing heavy, because `settle` must run before torch is loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from cusearch_async.config import LOOPBACK, explain_unknown, split_overrides
from cusearch_async.errors import ConfigError, CusearchError

log = logging.getLogger(__name__)

SAY_S = 5.0
"""Who waits says for what, every so often."""
_PR_SET_PDEATHSIG = 1
_NICENESS = 10
CANCEL_AGAIN_S = 1.0
LEAVE_S = 60.0
"""What the other ranks of a learner that has done its work are given to end."""


class Parser(argparse.ArgumentParser):
    """Refuses in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse(self) -> tuple[argparse.Namespace, list[str]]:
        """The command line: a command's own arguments, and the settings that it overrides."""
        own, overrides = split_overrides(sys.argv[1:])
        arguments, unknown = self.parse_known_args(own)
        if unknown:
            self.error(explain_unknown(unknown))
        return arguments, overrides


@contextmanager
def last_words(name: str) -> Iterator[None]:
    """Around all that an entry point does: a failure with a name ends the process with one line and status 1.

    Names are those of `errors`, and of a file or folder that the system refuses. Anything else is a bug of ours, and
    keeps its traceback."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except (CusearchError, OSError, ExceptionGroup) as error:
        named = first_named(error)
        if named is None:
            raise
        sys.exit(f"{name}: {named}")


def first_named(error: BaseException) -> str | None:
    """What to say of the error that ended a process, also from within the group of a TaskGroup; None for a bug."""
    if isinstance(error, CusearchError):
        return str(error)
    if isinstance(error, OSError) and isinstance(error.filename, str | bytes):
        return f"{os.fsdecode(error.filename)}: {error.strerror}; check the path, its permissions and the disk"
    if isinstance(error, BaseExceptionGroup):
        found = (first_named(inner) for inner in error.exceptions)
        return next((inner for inner in found if inner is not None), None)
    return None


def settle(cores: Sequence[int], gpus: Sequence[int] = ()) -> None:
    """Stay on `cores` and `gpus` (empty: all), with a thread a core, and let waiting threads sleep.

    OpenMP threads that spin while they wait starve the other processes of the run on a small machine. The
    libraries read these variables when they are loaded, so this comes before torch is imported. Cores that
    this machine does not have are left out; if none is left, all are used."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if os.environ.get("MASTER_ADDR", LOOPBACK[0]) in LOOPBACK:  # else they listen at what the host's name stands for
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # vLLM would bind to cores of its own choice
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # on CPU: the model lives in the engine's process
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # only such an engine dies with its worker (below)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")  # of libraries about each other
    warnings.simplefilter("ignore", FutureWarning)
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    usable = sorted(set(cores) & os.sched_getaffinity(0))
    if usable:
        os.sched_setaffinity(0, usable)
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))


def require_gpus(key: str, gpus: Sequence[int]) -> None:
    """After `settle`, which has made `gpus` the only ones that this process sees.

    Raises: ConfigError when the config names GPUs that CUDA does not find: torch would go on without a word, on the
    CPU."""
    found = count_gpus() if gpus else 0
    if found < len(gpus):
        raise ConfigError(
            f"{key} = {list(gpus)}, but CUDA finds {found} of them on this machine; name others (nvidia-smi lists "
            "them), or none to run without a GPU"
        )


def require_device(key: str, device: str) -> None:
    """Raises: ConfigError when `device` is a GPU ("cuda", "cuda:1") that CUDA does not find."""
    kind, _, index = device.partition(":")
    if kind == "cuda" and count_gpus() <= int(index or 0):
        raise ConfigError(f"{key} = {device!r}, but CUDA finds {count_gpus()} GPUs on this machine; set it to 'cpu'")


def count_gpus() -> int:
    """CUDA devices that torch can use in this process."""
    import torch  # noqa: PLC0415  (reads what `settle` sets when it is loaded)

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def give_way() -> None:
    """Take of the cores what the run's other processes leave free, and a tenth of what they keep busy.

    Where Linux shares cores among sessions (autogroup), a nice process in a session of its own gives way to nobody:
    then the session has to be nice, if it is ours alone."""
    os.nice(_NICENESS)
    session = Path("/proc/self/autogroup")
    if session.exists() and os.getsid(0) == os.getpid():
        try:
            session.write_text(str(_NICENESS), encoding="utf-8")
        except OSError as error:
            log.warning("%s cannot be set (%s); this process may slow the run", session, error.strerror)


def share_of(cores: Sequence[int], index: int, count: int) -> list[int]:
    """The cores of process `index` of `count`; all of them when there are too few to share."""
    return list(cores[index::count]) if len(cores) >= count else list(cores)


def log_to_stderr(name: str) -> None:
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name}: %(message)s", datefmt="%H:%M:%S", force=True)
    for noisy in ("httpx", "aiohttp.access", "vllm", "transformers", "DeepSpeed", "torch", "faiss"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # Each of the Hub's retries is a warning; what fails in the end is said by us.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def stop_signals() -> list[signal.Signals]:
    """What asks a process to end in good order: ctrl-C, SIGTERM, and a terminal that is closed or an ssh that is cut
    off; not the last where `nohup` has said so."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else [])]


def stop_on_signals() -> asyncio.Event:
    """An event that `stop_signals` set; loops watch it and end by themselves."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, stop.set)
    return stop


@contextmanager
def saying(log: logging.Logger, what: str) -> Iterator[None]:
    """Around what may take long, also what blocks: every SAY_S a thread logs `what`, and how long it has lasted."""
    began, ended = time.monotonic(), threading.Event()

    def say() -> None:
        while not ended.wait(SAY_S):
            log.info("%s: %.0f s", what, time.monotonic() - began)

    thread = threading.Thread(target=say, name="saying", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


async def unless_stopped(work: asyncio.Future[Any], stop: asyncio.Event) -> bool:
    """Wait for `work`, or end it when `stop` is set; whether it was done."""
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
        return work.done()
    finally:
        stopped.cancel()
        await end_tasks([work])


async def end_tasks(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel tasks until they have ended: a library in between may swallow one cancellation."""
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=CANCEL_AGAIN_S)


async def serve(application: web.Application, url: str, key: str) -> None:
    """Serve on loopback at the port of `url`, which the config calls `key`, until a signal comes.

    Raises: ConfigError when the port is taken."""
    stop = stop_on_signals()
    application.middlewares.append(_only_asked_on_purpose(url))
    # who has gone away is not worked for, and none of those who wait may hold up the end
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=5)
    await runner.setup()
    port = urlsplit(url).port or 80
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
    except OSError as error:
        raise ConfigError(f"{key}: cannot listen on port {port} ({error.strerror}); choose another") from error
    log.info("listening at %s", url)
    await stop.wait()
    await runner.cleanup()


def _only_asked_on_purpose(url: str) -> Middleware:
    """Refuses what a browser sends because some web page told it to: a name of that page's for our address, and a POST
    of a type that browsers send anywhere without asking. Programs name the address and say that they send JSON."""
    ours = {*LOOPBACK, urlsplit(url).hostname}

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if _name_of(request.host) not in ours:
            said = f"this is not {request.host!r}; ask at {url}, or at a loopback address"
            return web.json_response({"error": said}, status=421)
        if request.method == "POST" and request.content_type != "application/json":
            said = f"Content-Type must be application/json, got {request.content_type}"
            return web.json_response({"error": said}, status=415)
        return await handler(request)

    return check


def _name_of(host: str) -> str | None:
    """Of a Host header, without the port."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def free_port() -> int:
    """A TCP port on loopback that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_child(
    command: Sequence[str], env: dict[str, str] | None = None, log_file: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a process that does not outlive this one, not even after kill -9; signals are ours to pass on.

    With `log_file` its output is appended there, else it goes where ours goes."""
    output = log_file.open("ab") if log_file else None
    try:
        return subprocess.Popen(
            list(command),
            env=os.environ | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509  (no threads run yet where children are started)
        )
    finally:
        if output:
            output.close()


def die_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """The kernel sends this process a signal when the one that started it ends, in whatever way."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)


@contextmanager
def other_ranks(module: str, count: int) -> Iterator[int]:
    """Be rank 0 of `count` with the other ranks as children, or the rank that RANK says; yields the rank.

    When another rank fails, this process ends too: it would wait for it in a collective."""
    if "RANK" in os.environ or count == 1:
        yield int(os.environ.get("RANK", "0"))
        return
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared["CUSEARCH_RANKS_SECRET"] = secrets.token_hex(32)
    command = [sys.executable, "-m", module, *sys.argv[1:]]
    children = [start_child(command, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(1, count)]
    os.environ.update(shared | {"RANK": "0", "LOCAL_RANK": "0"})
    ending = threading.Event()
    for rank, child in enumerate(children, start=1):
        threading.Thread(target=_end_when_child_fails, args=(rank, child, ending), daemon=True).start()
    try:
        yield 0
        ending.set()
        _see_off(children)
    finally:
        ending.set()
        for child in children:
            child.kill()


def _see_off(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for the other ranks of a learner that has done its work: how they leave changes nothing of it."""
    deadline = time.monotonic() + LEAVE_S
    for rank, child in enumerate(children, start=1):
        try:
            status = child.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("rank %d did not end within %g s; killed", rank, LEAVE_S)
        else:
            if status:
                log.warning("rank %d ended with status %d when the learner had done its work", rank, status)


def _end_when_child_fails(rank: int, child: subprocess.Popen[bytes], ending: threading.Event) -> None:
    status = child.wait()
    if status and not ending.is_set():
        log.error("rank %d ended with status %d; the learner ends too", rank, status)
        os._exit(1)


if "__mp_main__" in sys.modules:
    # This is a process that multiprocessing has spawned from one of ours, as vLLM does its engine: it imports what ours
    # has, before all else. SIGTERM would not end an engine that waits for its dead worker to greet it. Not covered:
    # a worker that ends before its engine has come this far (a fraction of a second); vLLM gives up after five minutes.
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the worker gives its tickets back first, and ends us then
