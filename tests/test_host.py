"""What a process of a run is before it is anything else."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from cusearch_async import host
from cusearch_async.errors import ConfigError
from cusearch_async.transport.server import is_listening
from tests.conftest import SLOW, wait_until_async

AUTOGROUP = Path("/proc/self/autogroup")
GIVE_WAY = """
import os, pathlib
from cusearch_async import host
from cusearch_async.errors import ConfigError
host.give_way()
print(os.nice(0), pathlib.Path("/proc/self/autogroup").read_text())
"""


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel shares cores among processes, not sessions")
@pytest.mark.parametrize(
    "starter", [[], [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])"]]
)
@pytest.mark.system
def test_a_process_gives_way_with_its_session_only_if_that_is_its_own(tmp_path: Path, starter: list[str]):
    child = host.start_child([*starter, sys.executable, "-c", GIVE_WAY], log_file=tmp_path / "log")
    assert child.wait(timeout=30 * SLOW) == 0
    nice, _, _, of_session = (tmp_path / "log").read_text().split()
    least = min(os.nice(0) + 10, 19)  # beside what these tests were started with, and never above the kernel's most
    assert (int(nice), of_session) == (least, "0" if starter else "10")


@pytest.mark.parametrize("module", ["cusearch_async.processes.start", "workers.learner", "workers.retriever"])
@pytest.mark.system
def test_help_of_a_process_is_no_failure(module: str):
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "a TOML file" in done.stdout


def test_gpus_that_are_not_there_are_named():
    host.require_gpus("learner.gpus", ())
    with pytest.raises(ConfigError, match=r"learner.gpus = \[0, 1, .*996\], but CUDA finds \d+ of them"):
        host.require_gpus("learner.gpus", range(997))
    with pytest.raises(ConfigError, match=r"retriever.dense.device = 'cuda:997', but CUDA finds \d+ GPUs"):
        host.require_device("retriever.dense.device", "cuda:997")
    host.require_device("retriever.dense.device", "cpu")


@pytest.mark.system
@pytest.mark.parametrize("process", ["learner", "rollout", "evaluator"])
def test_a_process_whose_gpu_is_not_there_ends_with_one_line(process: str, tmp_path: Path):
    settings = [f"--{process if process != 'evaluator' else 'eval'}.gpus", "[997]", "--eval.every", "1"]
    settings += ["--run.folder", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "cusearch_async.processes.start", process, "atlas", *settings],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.search(r"gpus = \[997\], but CUDA finds 0 of them.*name others.*or none", line), line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError("learner.lr: too high"), "test: learner.lr: too high"),
        (ExceptionGroup("tasks", [ValueError("x"), ConfigError("no")]), "test: no"),
        (FileNotFoundError(2, "No such file or directory", "/nowhere"), "test: /nowhere: No such file or directory"),
        (
            ExceptionGroup("tasks", [PermissionError(13, "Permission denied", b"/root")]),
            "test: /root: Permission denied",
        ),
    ],
)
def test_a_failure_with_a_name_is_one_line(error: Exception, line: str):
    with pytest.raises(SystemExit) as ended, host.last_words("test"):
        raise error
    assert str(ended.value.code).startswith(line)
    assert "\n" not in str(ended.value.code)


@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyError("x"), OSError("no path"), ExceptionGroup("", [ValueError()])]
)
def test_a_bug_keeps_its_traceback(error: Exception):
    with pytest.raises(type(error)), host.last_words("test"):
        raise error


@pytest.mark.system
def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path: Path):
    """Whatever the libraries say of their retries."""
    command = [
        sys.executable,
        "-m",
        "cusearch_async.cli.main",
        "launch",
        "atlas",
        "--model.path",
        "nobody/no-such-model",
    ]
    command += ["--run.folder", str(tmp_path / "run")]
    env = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{host.free_port()}", "HF_HOME": str(tmp_path / "hub")}
    env.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "model.path 'nobody/no-such-model'" in line
    assert not (tmp_path / "run").exists()


@pytest.fixture
async def served() -> AsyncIterator[str]:
    """The address of a server that answers every POST /x with what it was sent, and GET /x."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(await request.json() if request.method == "POST" else "here")

    application = web.Application()
    application.router.add_post("/x", answer)
    application.router.add_get("/x", answer)
    url = f"http://retriever.test:{host.free_port()}"
    address = url.replace("retriever.test", "127.0.0.1")
    serving = asyncio.create_task(host.serve(application, url, "retriever.url"))
    await wait_until_async(lambda: asyncio.to_thread(is_listening, address), 20)
    yield address
    os.kill(os.getpid(), signal.SIGTERM)
    await serving


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "application/json"}, 200),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Type": "application/json", "Host": "localhost:1"}, 200),
        ({"Content-Type": "application/json", "Host": "[::1]:8000"}, 200),
        ({"Content-Type": "application/json", "Host": "retriever.test"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
        ({"Content-Type": ""}, 415),
        ({"Content-Type": "application/json", "Host": "evil.example"}, 421),
        ({"Content-Type": "application/json", "Host": "127.0.0.1.evil.example:8000"}, 421),
        ({"Content-Type": "application/json", "Host": "[::1"}, 421),
        ({"Content-Type": "application/json", "Host": ""}, 421),
    ],
)
async def test_a_server_answers_nothing_that_a_web_page_can_make_a_browser_send(served, headers, status):
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{served}/x", data=b'{"queries": []}', headers=headers) as response:
            assert response.status == status
            answer = await response.json()
        assert answer == ({"queries": []} if status == 200 else {"error": answer["error"]})
        foreign = {"Host": headers["Host"]} if "Host" in headers else {}
        async with session.get(f"{served}/x", headers=foreign) as response:
            assert response.status == (421 if status == 421 else 200)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_process_is_asked_to_stop_by_each_signal(number: signal.Signals):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
    try:
        stop = host.stop_on_signals()
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.wait(), 5 * SLOW)
    finally:
        for handled in host.stop_signals():
            asyncio.get_running_loop().remove_signal_handler(handled)
        signal.signal(signal.SIGHUP, before)


async def test_nohup_is_heeded():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = host.stop_on_signals()
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.05)
        assert not stop.is_set()
    finally:
        for handled in host.stop_signals():
            asyncio.get_running_loop().remove_signal_handler(handled)
        signal.signal(signal.SIGHUP, before)


PROBE = """
import os, sys
from pathlib import Path
from cusearch_async import host

if __name__ == "__main__":
    with host.other_ranks("rank_probe", 3) as rank:
        names = ("WORLD_SIZE", "MASTER_ADDR", "CUSEARCH_RANKS_SECRET")
        Path(sys.argv[1], str(rank)).write_text(" ".join(os.environ[name] for name in names))
"""


@pytest.mark.system
def test_the_ranks_of_a_learner_share_a_secret_that_each_start_makes_anew(tmp_path: Path):
    (tmp_path / "rank_probe.py").write_text(PROBE)
    path = f"{tmp_path}:{Path(host.__file__).parents[1]}"
    secrets = set()
    for start in ("first", "second"):
        folder = tmp_path / start
        folder.mkdir()
        command = [sys.executable, "-m", "rank_probe", str(folder)]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True, timeout=60 * SLOW)
        (said,) = {(folder / str(rank)).read_text() for rank in range(3)}
        assert said.startswith("3 127.0.0.1 ")
        secrets.add(said.split()[-1])
    assert len(secrets) == 2
    assert all(len(secret) == 64 for secret in secrets)


LEAVES = """
import logging, sys, time
from cusearch_async import host

if __name__ == "__main__":
    host.LEAVE_S = 1.0
    logging.basicConfig()
    with host.other_ranks("rank_probe", 3) as rank:
        time.sleep(600 if rank == 1 else rank / 4)
    if rank == 2:
        sys.exit(3)
    time.sleep(0.5)  # long enough for who would end rank 0 because others were killed
    print(rank, "has left")
"""


@pytest.mark.system
def test_a_rank_that_is_slow_to_leave_does_not_spoil_a_learner_that_has_done_its_work(tmp_path: Path):
    (tmp_path / "rank_probe.py").write_text(LEAVES)
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(host.__file__).parents[1]}"}
    command = [sys.executable, "-m", "rank_probe"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120 * SLOW, check=False)
    assert (done.returncode, done.stdout) == (0, "0 has left\n"), done.stderr
    assert "rank 1 did not end within 1 s; killed" in done.stderr
    assert "Traceback" not in done.stderr


async def test_work_that_swallows_its_cancellation_is_cancelled_again(monkeypatch):
    monkeypatch.setattr(host, "CANCEL_AGAIN_S", 0.05)
    swallowed = []

    async def work() -> None:
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                if len(swallowed) == 2:
                    raise
                swallowed.append("once more")

    stop = asyncio.Event()
    waiting = asyncio.create_task(host.unless_stopped(asyncio.ensure_future(work()), stop))
    await asyncio.sleep(0.01)
    stop.set()
    done, _ = await asyncio.wait((waiting,), timeout=20 * SLOW)
    assert done
    assert waiting.result() is False
    assert len(swallowed) == 2


SPAWNS = """
import ctypes, multiprocessing, os
from cusearch_async import host

def ask():
    signal = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(signal))  # PR_GET_PDEATHSIG
    print(signal.value, flush=True)

if __name__ == "__main__":
    host.settle([])
    child = multiprocessing.get_context(os.environ["VLLM_WORKER_MULTIPROC_METHOD"]).Process(target=ask)
    child.start()
    child.join()
"""


@pytest.mark.system
def test_an_engine_is_started_so_that_it_dies_with_its_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """vLLM forks its engine on CUDA unless it is told otherwise, and a forked one is not armed."""
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    (tmp_path / "worker.py").write_text(SPAWNS)
    child = host.start_child([sys.executable, str(tmp_path / "worker.py")], log_file=tmp_path / "log")
    assert child.wait(timeout=60 * SLOW) == 0
    assert (tmp_path / "log").read_text().split() == [str(int(signal.SIGKILL))]


def test_what_blocks_says_what_it_is_and_how_long_it_lasts(monkeypatch, caplog):
    monkeypatch.setattr(host, "SAY_S", 0.05)
    caplog.set_level("INFO")
    with host.saying(logging.getLogger(), "waiting for the model to be loaded"):
        time.sleep(0.3)
    said = len(caplog.messages)
    assert said >= 2
    assert set(caplog.messages) == {"waiting for the model to be loaded: 0 s"}
    time.sleep(0.15)
    assert len(caplog.messages) == said, "it has ended"


def test_what_is_done_at_once_says_nothing(caplog):
    caplog.set_level("INFO")
    with host.saying(logging.getLogger(), "waiting"):
        pass
    assert not caplog.messages
