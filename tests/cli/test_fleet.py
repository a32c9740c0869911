"""Starting, quoting and stopping the processes of a run; small scripts stand in for the large ones."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import termios
import threading
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console

from cusearch_async.cli import launch
from cusearch_async.cli.parts import fleet as fleets
from cusearch_async.cli.parts import live
from cusearch_async.cli.parts.fleet import Child, Fleet
from cusearch_async.config import load_config
from cusearch_async.data.questions import refuse_another_world
from cusearch_async.errors import ConfigError, ProcessDied, RetrievalUnavailable, RunInUse
from cusearch_async.lifecycle.children import start_child
from cusearch_async.run import folder as run_folder
from cusearch_async.run.history import record_start
from cusearch_async.run.provenance import launched_by
from cusearch_async.training.checkpoint import Checkpoints, state_at
from cusearch_async.transport.interface import MethodState
from tests.conftest import SLOW, free_port, wait_until

GOODBYE = """
import signal, sys, time
def end(*_):
    print(sys.argv[1], file=open(sys.argv[2], "a"), flush=True)
    print("10:00:00", sys.argv[1] + ": stopped; checkpoint saved", flush=True)
    time.sleep(float(sys.argv[3]))
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
while True:
    time.sleep(1)
"""


@pytest.fixture
def config(atlas_config, tmp_path, redis_url):
    return load_config(
        atlas_config,
        [
            "--run.folder",
            str(tmp_path / "run"),
            "--redis.url",
            redis_url,
            "--retriever.url",
            f"http://127.0.0.1:{free_port()}",
        ],
    )


@pytest.fixture
def fleet(config):
    with Fleet(config) as fleet:
        yield fleet


def start(fleet: Fleet, folder: Path, name: str, script: str, *arguments: object) -> Child:
    log = folder / f"{name}.log"
    began = log.stat().st_size if log.exists() else 0
    process = start_child([sys.executable, "-c", script, *map(str, arguments)], log_file=log)
    fleet.children[name] = Child(name, process, log, began, began)
    return fleet.children[name]


@pytest.mark.system
def test_workers_end_before_the_learner_and_the_services_last(fleet, tmp_path, caplog):
    caplog.set_level("INFO")
    said = tmp_path / "said"
    names = ["redis", "retriever", "learner", "evaluator", "rollout-0", "rollout-1"]
    children = [start(fleet, tmp_path, name, GOODBYE, name, said, 0.3) for name in names]
    wait_until(lambda: all("ready" in child.log.read_text() for child in children), 20)
    fleet.stop()
    order = said.read_text().split()
    assert set(order[:3]) == {"rollout-0", "rollout-1", "evaluator"}
    assert order[3:] == ["learner", "retriever", "redis"]
    assert [child.process.returncode for child in children] == [0] * 6, "each ended by itself"
    assert fleet.children == {}
    assert caplog.messages == ["learner: stopped; checkpoint saved"], "what a user wants to know"


@pytest.fixture
def interruptible():
    """Also where these tests run in the background of a script, which ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_kills_at_once(fleet, tmp_path):
    said = tmp_path / "said"
    children = [start(fleet, tmp_path, name, GOODBYE, name, said, 600) for name in ("redis", "rollout-0")]
    wait_until(lambda: all("ready" in child.log.read_text() for child in children), 20)

    def interrupt_again():
        wait_until(said.exists, 20)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt_again)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        fleet.stop()
    thread.join()
    assert [child.process.returncode for child in children] == [-signal.SIGKILL] * 2


def test_each_process_is_told_its_gpus(config, monkeypatch):
    """On faked cards; nothing is started."""
    commands = {}
    monkeypatch.setattr("cusearch_async.lifecycle.gpus.list_gpus", lambda: ("0", "1", "2", "3"))
    monkeypatch.setattr(Fleet, "_start", lambda self, name, command, env=None: commands.update({name: command}))
    changes = {
        "rollout": config.rollout.model_copy(update={"workers": 2}),
        "eval": config.eval.model_copy(update={"every": 1}),
    }
    Fleet(config.model_copy(update=changes)).start_run()
    told = {name: command[command.index("--gpu") + 1] for name, command in commands.items()}
    assert told == {"learner": "3", "evaluator": "2", "rollout-0": "0", "rollout-1": "1"}
    taken = config.model_copy(update={"rollout": config.rollout.model_copy(update={"gpus": (2,)})})
    assert Fleet(taken).gpus_of_worker() == {"CUDA_VISIBLE_DEVICES": "2"}, "a demo scored on GPU 0, whoever had it"
    monkeypatch.setattr("cusearch_async.lifecycle.gpus.list_gpus", lambda: ())
    assert Fleet(config).gpus_of_worker() == {}
    Fleet(config).start_run()
    assert not any("--gpu" in commands[name] for name in ("learner", "rollout-0"))


LAUNCH = """
import sys
from pathlib import Path
from rich.console import Console
from cusearch_async.cli.parts import live
from cusearch_async.cli.parts.fleet import Fleet
from cusearch_async.config import load_config
from cusearch_async.lifecycle.entry import exit_with_one_line, log_to_stderr
from tests.cli.test_fleet import GOODBYE, start
log_to_stderr("cusearch")
config, folder = load_config(Path(sys.argv[1]), ["--run.folder", sys.argv[2]]), Path(sys.argv[3])
with exit_with_one_line("cusearch"), Fleet(config) as fleet:
    for name in ("redis", "learner", "rollout-0"):
        start(fleet, folder, name, GOODBYE, name, folder / "said", 1)
    live.Screen(fleet, Console()).wait(lambda: "waiting", lambda: False, list)
"""


def take_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup


@pytest.mark.system
@pytest.mark.parametrize("nohup", [False, True])
def test_a_closed_terminal_ends_a_launch_in_good_order(config, atlas_config, tmp_path, nohup):
    """The terminal says so, and the shell once more; nobody reads any more what is printed meanwhile."""
    command = [*(["nohup"] if nohup else []), sys.executable, "-c", LAUNCH, atlas_config, config.folder, tmp_path]
    terminal, inner = pty.openpty()
    launched = subprocess.Popen(
        list(map(str, command)),
        stdin=inner,
        stdout=inner,
        stderr=inner,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=take_terminal,  # noqa: PLW1509  (no threads run here)
    )
    os.close(inner)
    logs = [tmp_path / f"{name}.log" for name in ("redis", "learner", "rollout-0")]
    wait_until(lambda: launched.poll() or all(log.exists() and "ready" in log.read_text() for log in logs), 30)
    assert launched.poll() is None, os.read(terminal, 10_000).decode()
    os.close(terminal)
    said = tmp_path / "said"
    if nohup:
        with (tmp_path / "learner.log").open("a") as log:
            log.write("10:00:00 learner: step 7\n")
        wait_until(lambda: "learner: step 7" in (tmp_path / "nohup.out").read_text(), 20)
        assert not said.exists(), "it continues"
        launched.terminate()
    wait_until(said.exists, 20)
    launched.send_signal(signal.SIGHUP)
    assert launched.wait(20 * SLOW), "130, or what came of printing to a terminal that is gone"
    assert said.read_text().split() == ["rollout-0", "learner", "redis"], "each had the time to end"


@pytest.mark.parametrize(("drain_s", "in_all"), [(0.0, "0.2"), (0.3, "0.5")])
def test_what_does_not_end_in_time_is_killed_and_named(fleet, tmp_path, monkeypatch, caplog, drain_s, in_all):
    """A worker that drains has that time, too."""
    monkeypatch.setattr(fleets, "_STAGES", ((("rollout",), 0.2),))
    rollout = fleet._config.rollout.model_copy(update={"drain_s": drain_s})
    fleet._config = fleet._config.model_copy(update={"rollout": rollout})
    child = start(fleet, tmp_path, "rollout-0", GOODBYE, "rollout-0", tmp_path / "said", 600)
    wait_until(lambda: "ready" in child.log.read_text(), 20)
    fleet.stop()
    assert child.process.returncode == -signal.SIGKILL
    assert f"rollout-0 did not end within {in_all} s; killed" in caplog.text


def test_a_learner_has_as_long_as_it_may_be_silent(fleet, tmp_path, monkeypatch, caplog):
    """Five minutes were less than a step and a checkpoint of a large model: it was killed while it saved."""
    monkeypatch.setattr(fleets, "_STAGES", ((("learner",), 0.1),))
    child = start(fleet, tmp_path, "learner", GOODBYE, "learner", tmp_path / "said", 1)
    wait_until(lambda: "ready" in child.log.read_text(), 20)
    fleet.stop()
    assert child.process.returncode == 0
    assert "killed" not in caplog.text


ENGINE = "(EngineCore pid=7) ERROR 11-21 [core.py:9] RuntimeError: Unsupported CPU attention configuration: head_dim=16"


@pytest.mark.parametrize(
    ("log", "quoted"),
    [
        (
            ["10:00:00 learner: step 1", "learner: Redis at x cannot be reached", "UserWarning: leaked semaphores"],
            "learner: Redis at x cannot be reached",
        ),
        (
            ["Traceback (most recent call last):", '  File "x.py"', "torch.OutOfMemoryError: CUDA", "[W] sockets.cpp"],
            "torch.OutOfMemoryError: CUDA",
        ),
        (
            [ENGINE, "  warnings.warn(", "rollout: the vLLM engine died", "leaked semaphores"],
            "rollout: the vLLM engine died (RuntimeError: Unsupported CPU attention configuration: head_dim=16)",
        ),
        (["something else", "Segmentation fault"], "Segmentation fault"),
    ],
)
def test_a_process_that_dies_is_quoted_by_its_last_error(fleet, tmp_path, log, quoted):
    (tmp_path / "rollout-0.log").write_text("rollout: the error of an earlier start\n")
    script = "import sys; print(*sys.argv[1:], sep='\\n'); sys.exit(3)"
    child = start(fleet, tmp_path, "rollout-0", script, *log)
    child.process.wait()
    with pytest.raises(ProcessDied) as died:
        fleet.check()
    assert str(died.value) == f"rollout-0 ended with status 3: {quoted} (log: {child.log})"


def test_workers_wait_for_this_learners_take_over_not_for_starts_that_it_fetches(config, monkeypatch):
    """Of a learner on another machine, out of learner.checkpoint_objects. Before, workers met the old contract."""
    record_start(config, epoch=1, step=0)
    starts, looks = config.folder / "starts", []
    earlier = msgspec.json.decode((starts / "0001.json").read_bytes()) | {"time": "2026-01-01T00:00:00+00:00"}
    (starts / "0001.json").write_bytes(msgspec.json.encode(earlier))  # the system has given its number again
    elsewhere = earlier | {"epoch": 2, "host": "elsewhere", "time": "2036-01-01T00:00:00+00:00"}

    def wait(fleet, is_done, poll_s=0.0):
        looks.append(is_done())
        (starts / "0002.json").write_bytes(msgspec.json.encode(elsewhere))
        looks.append(is_done())
        record_start(config, epoch=3, step=0)
        looks.append(is_done())

    def start(fleet, name, command, env=None):
        of_this_test = SimpleNamespace(pid=os.getpid(), poll=lambda: None)
        fleet.children[name] = SimpleNamespace(process=of_this_test)

    monkeypatch.setattr(Fleet, "_start", start)
    monkeypatch.setattr(Fleet, "wait", wait)
    Fleet(config).start_run(accept_changes=True)
    assert looks == [False, False, True]


def test_a_process_that_was_killed_is_not_quoted(fleet, tmp_path):
    script = "import time; print('17:52:27 learner: step 92', flush=True); time.sleep(600)"
    child = start(fleet, tmp_path, "learner", script)
    wait_until(lambda: "step 92" in child.log.read_text(), 20)
    child.process.kill()
    child.process.wait()
    with pytest.raises(ProcessDied, match=r"learner was killed by SIGKILL \(the kernel .*dmesg`; log: .*learner.log\)"):
        fleet.check()


@pytest.mark.system
def test_each_process_gets_the_secrets_that_it_needs(fleet, monkeypatch):
    for secret in fleets._SECRETS:
        monkeypatch.setenv(secret, "hush")
    fleet.start_services()
    of_engines = {"SERPER_API_KEY": "hush", "SERPAPI_API_KEY": "hush", "CUSEARCH_SIMULATOR_KEY": "hush"}
    assert read_environment(fleet.children["retriever"]) == of_engines
    fleet.start_run()
    of_the_run = {f"CUSEARCH_{what}": "hush" for what in ("REDIS_PASSWORD", "SENTINEL_PASSWORD", "WEIGHTS_TOKEN")}
    assert read_environment(fleet.children["learner"]) == of_the_run
    assert read_environment(fleet.children["rollout-0"]) == of_the_run | {"CUSEARCH_AGENTS_TOKEN": "hush"}


def test_who_runs_episodes_also_gets_what_an_environment_passes(atlas_config, config, monkeypatch):
    """An agent that searches with its own key had none under launch."""
    agent = {"name": "agent", "agent": "mine:answer", "passes": "SERPER_API_KEY,WANDB_API_KEY"}
    own = [word for key, value in agent.items() for word in (f"--environment.search.{key}", value)]
    fleet, given = Fleet(load_config(atlas_config, ["--run.folder", str(config.folder), *own])), {}
    fleet._logs.mkdir(parents=True)
    monkeypatch.setattr(fleets, "start_child", lambda command, env, *_: given.setdefault(command[0], env))
    for name in ("rollout-0", "evaluator", "learner"):
        fleet._start(name, [name])
    for name, is_withheld in (("rollout-0", False), ("evaluator", False), ("learner", True)):
        assert ("SERPER_API_KEY" in given[name], "WANDB_API_KEY" in given[name]) == (is_withheld, is_withheld)
        assert given[name]["SERPAPI_API_KEY"] == ""


def test_every_secret_that_the_package_reads_has_processes_that_need_it():
    """Others are started without it."""
    named = re.compile(r'"([A-Z_]+_(?:PASSWORD|TOKEN|KEY))"')
    files = Path(fleets.__file__).parents[2].rglob("*.py")
    found = {name for file in files for name in named.findall(file.read_text(encoding="utf-8"))}
    given_to_agents = {"OPENAI_API_KEY", "ANTHROPIC_API_KEY"}
    assert found - given_to_agents == set(fleets._SECRETS)


class Unstarted(Fleet):
    """Starts nothing: it writes down with which environment it would."""

    def _start(self, name, command, env=None):
        self.children[name] = env


def test_the_learner_is_told_by_which_command_it_was_started(config, monkeypatch):
    typed = ["/usr/bin/cusearch", "launch", "atlas", "--run.name", "two words"]
    monkeypatch.setattr(sys, "argv", typed)
    fleet = Unstarted(config)
    fleet.start_run()
    for name, value in fleet.children["learner"].items():
        monkeypatch.setenv(name, value)
    assert launched_by() == typed


def read_environment(child: Child) -> dict[str, str]:
    """Of a process's environment, what says hush."""
    lines = Path(f"/proc/{child.process.pid}/environ").read_text().split("\0")
    return {name: value for name, _, value in (line.partition("=") for line in lines) if value == "hush"}


def test_a_retriever_that_does_not_start_is_waited_for_and_named(fleet, config, monkeypatch, caplog):
    monkeypatch.setattr("cusearch_async.lifecycle.progress.LOG_EVERY_S", 0.05)
    caplog.set_level("INFO")
    fleet._config = config.model_copy(update={"run": config.run.model_copy(update={"wait_s": 0.3})})
    with pytest.raises(RetrievalUnavailable, match=f"the retriever did not start at {config.retriever.url} within"):
        fleet.start_services()
    assert re.search(f"waiting for the retriever at {config.retriever.url}: [0-9]+ s", caplog.text)


def test_a_retriever_that_is_there_already_is_used_and_named(config, caplog):
    """It may have another corpus than the config's."""
    caplog.set_level("INFO")
    fleet = Unstarted(config)
    with socket.create_server(("127.0.0.1", int(config.retriever.url.rpartition(":")[2]))):
        fleet.start_services()
    assert fleet.children == {}
    assert f"reusing the retriever already running at {config.retriever.url}" in caplog.text


def test_a_retriever_of_an_embedded_world_is_not_started_for_other_questions(config, atlas_config, monkeypatch):
    """A user's server that starts a minute late was replaced by one that answers with geography."""
    mine = config.model_copy(update={"data": config.data.model_copy(update={"source": ("mine.jsonl",)})})
    fleet = Unstarted(mine)
    monkeypatch.setattr(fleet, "_wait_for_service", lambda *_: None)
    with pytest.raises(
        RetrievalUnavailable, match=rf"the embedded world atlas, .*start your server at .*{mine.retriever.url}"
    ):
        fleet.start_services()
    assert fleet.children == {}
    with socket.create_server(("127.0.0.1", int(mine.retriever.url.rpartition(":")[2]))):
        fleet.start_services()
    own = ["--environment.search.name", "docs.examples.calculator:Calculator"]  # it brings its questions
    refuse_another_world(load_config(atlas_config, own))


def test_a_folder_has_one_launch_at_a_time(fleet, config, atlas_config):
    with pytest.raises(RunInUse, match="is in use: a launch, a demo or a warm start runs in it"), Fleet(config):
        pass
    overrides = ["--run.folder", str(config.folder)]
    with pytest.raises(RunInUse, match="is in use: a launch, a demo or a warm start runs in it"):
        launch.run(Namespace(config=atlas_config, accept_changes=False, take_over=True), overrides)
    assert run_folder.read_marker(config.folder).run == config.run.name


def test_a_launch_with_another_method_is_refused_before_anything_starts(config, atlas_config):
    run_folder.mark(config.folder, config.run.name)
    record_start(config, epoch=1, step=0)
    overrides = ["--run.folder", str(config.folder), "--method.name", "random"]
    with pytest.raises(ConfigError, match=r"method\.name is 'random' here and .*, with --accept-changes"):
        launch.run(Namespace(config=atlas_config, accept_changes=False, take_over=False), overrides)
    assert not (config.folder / "logs").exists()


SPEAKING = """
import time
print("10:00:00 learner: resuming from step 10", flush=True)
print("FutureWarning: noise", flush=True)
print("10:00:01 learner: waiting for the pool of step 10: 34 of 64 groups", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_the_processes_say_is_shown_and_their_noise_is_not(fleet, tmp_path, is_terminal, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr("cusearch_async.lifecycle.progress.LOG_EVERY_S", 0.05)
    monkeypatch.setattr(live, "REFRESH_S", 0.02)
    (tmp_path / "learner.log").write_text("09:00:00 learner: from an earlier start\n")
    child = start(fleet, tmp_path, "learner", SPEAKING)
    wait_until(lambda: "34 of 64" in child.log.read_text(), 20)
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80)
    looks = iter(range(8))
    live.Screen(fleet, console).wait(lambda: "waiting for step 10", lambda: next(looks, None) == 7, list)
    shown = console.file.getvalue() if is_terminal else caplog.text
    for part in ("learner: resuming from step 10", "34 of 64 groups", "waiting for step 10: 0 s"):
        assert part in shown
    assert "noise" not in shown
    assert "earlier start" not in shown


def test_a_worker_may_end_with_its_run_and_not_before(fleet, config, tmp_path):
    start(fleet, tmp_path, "rollout-0", "pass").process.wait()
    with pytest.raises(ProcessDied, match="rollout-0 ended with status 0"):
        fleet.check()
    checkpoints = Checkpoints(config.folder, 2)
    checkpoints.begin(1, 0)
    folder = checkpoints.begin_write(config.run.steps)
    with checkpoints.write(state_at(config.run.steps, MethodState(), config)):
        (folder / "model").mkdir(parents=True)
    checkpoints.finish(config.run.steps)
    fleet.check()
    start(fleet, tmp_path, "retriever", "pass").process.wait()
    with pytest.raises(ProcessDied, match="retriever ended with status 0"):
        fleet.check()
