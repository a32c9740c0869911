"""GPUs that are not there are refused, and the evaluator gives way to the run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from cusearch_async.config import Config
from cusearch_async.errors import ConfigError
from cusearch_async.lifecycle import cuda
from cusearch_async.lifecycle.children import start_child
from cusearch_async.lifecycle.placement import (
    LAUNCHED,
    configure_process,
    count_sharers,
    require_device,
    require_gpus,
    require_libnuma,
)
from cusearch_async.processes import start
from cusearch_async.processes.start import rank_of_learner
from tests.conftest import SLOW

AUTOGROUP = Path("/proc/self/autogroup")


GIVE_WAY = """
import os, pathlib
from cusearch_async.lifecycle.placement import lower_priority
lower_priority()
print(os.nice(0), pathlib.Path("/proc/self/autogroup").read_text())
"""


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel shares cores among processes, not sessions")
@pytest.mark.parametrize(
    "starter", [[], [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])"]]
)
@pytest.mark.system
def test_a_process_gives_way_with_its_session_only_if_that_is_its_own(tmp_path: Path, starter: list[str]):
    child = start_child([*starter, sys.executable, "-c", GIVE_WAY], log_file=tmp_path / "log")
    assert child.wait(timeout=30 * SLOW) == 0
    nice, _, _, of_session = (tmp_path / "log").read_text().split()
    least = min(os.nice(0) + 10, 19)  # beside what these tests were started with, and never above the kernel's most
    assert (int(nice), of_session) == (least, "0" if starter else "10")


def test_gpus_that_are_not_there_are_named():
    require_gpus("learner.gpus", ())
    with pytest.raises(ConfigError, match=r"learner.gpus = \[0, 1, .*996\], but CUDA finds \d+ of them"):
        require_gpus("learner.gpus", [str(index) for index in range(997)])
    with pytest.raises(ConfigError, match=r"retriever.dense.device = 'cuda:997', but CUDA finds \d+ GPUs"):
        require_device("retriever.dense.device", "cuda:997")
    require_device("retriever.dense.device", "cpu")


@pytest.mark.system
@pytest.mark.parametrize("process", ["learner", "rollout", "evaluator"])
def test_a_process_whose_gpu_is_not_there_ends_with_one_line(process: str, tmp_path: Path):
    settings = [f"--{process if process != 'evaluator' else 'eval'}.gpus", "[997]", "--eval.every", "1"]
    settings += ["--run.folder", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "cusearch_async.cli.main", "worker", process, "atlas", *settings],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.search(r"gpus = \[997\], but CUDA finds 0 of them.*name other GPUs.*CUDA_VISIBLE_DEVICES=", line), line
    assert not (tmp_path / "run").exists()


@pytest.fixture
def environment(monkeypatch) -> dict[str, str]:
    """The variables of this process, as `configure_process` changes them; without those that it would keep."""
    own = {name: value for name, value in os.environ.items() if name not in CHOSEN}
    monkeypatch.setattr(os, "environ", own)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}))
    return own


CHOSEN = ("OMP_NUM_THREADS", "VLLM_LOGGING_LEVEL", "PYTORCH_CUDA_ALLOC_CONF", "LOCAL_WORLD_SIZE")


def config_of(**sections: dict[str, object]) -> Config:
    return Config.model_validate({"run": {"name": "x"}, **sections})


def test_processes_without_cores_share_the_machine(environment):
    config = config_of(learner={"ranks": 4}, rollout={"workers": 4})
    assert count_sharers(config) == 9  # and the retriever
    configure_process((), (), count_sharers(config))
    assert environment["OMP_NUM_THREADS"] == "7"


def test_a_process_with_cores_of_its_own_takes_nothing_from_the_others(environment):
    config = config_of(learner={"cores": [1]}, rollout={"cores": [0]}, eval={"every": 1})
    assert count_sharers(config) == 2  # evaluator and retriever
    configure_process((0,), (), 9)
    assert environment["OMP_NUM_THREADS"] == "1"


def test_a_retriever_elsewhere_takes_no_core_of_this_machine():
    assert count_sharers(config_of(retriever={"url": "http://10.0.0.5:8000"})) == 2


@pytest.mark.parametrize(
    ("cores", "bound", "threads"),
    [({}, set(), "64"), ({"learner": {"cores": [1]}, "rollout": {"cores": [0]}}, {0, 1}, "2")],
)
def test_a_warm_start_has_the_cores_of_the_engines_too(environment, monkeypatch, cores, bound, threads):
    """It runs alone, and had a third of the machine, or one core of the laptop's two."""
    found = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))

    def bind(_, chosen):
        found.extend(chosen)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(chosen))

    monkeypatch.setattr(os, "sched_setaffinity", bind)
    with rank_of_learner(config_of(**cores), is_alone=True):
        assert (set(found), environment["OMP_NUM_THREADS"]) == (bound, threads)


def test_processes_whose_cores_are_not_there_share_those_that_are(environment, monkeypatch):
    """In a container with the cores 2 and 3, each of three had a thread for both."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3})
    assert count_sharers(config_of(learner={"cores": [1]}, rollout={"cores": [0]})) == 3
    assert count_sharers(config_of(learner={"cores": [1, 2]}, rollout={"cores": [3]})) == 1


def test_a_process_has_at_least_one_thread_and_keeps_the_number_that_a_user_sets(environment):
    configure_process((), (), 1000)
    assert environment["OMP_NUM_THREADS"] == "1"
    assert "VLLM_OMP_NUM_THREADS_SET_BY_VLLM" in environment
    environment["OMP_NUM_THREADS"] = "3"
    del environment["VLLM_OMP_NUM_THREADS_SET_BY_VLLM"]
    configure_process(())
    assert environment["OMP_NUM_THREADS"] == "3"
    assert "VLLM_OMP_NUM_THREADS_SET_BY_VLLM" not in environment


def test_the_ranks_of_other_nodes_take_no_cores(environment):
    assert count_sharers(config_of(learner={"ranks": 16, "nodes": 2})) == 8 + 1 + 1


def test_a_process_of_a_run_on_several_machines_takes_this_one(environment):
    """A retriever on a machine of 64 cores searched with two of them: it shared with 16 workers that were elsewhere."""
    elsewhere = config_of(rollout={"workers": 16}, learner={"ranks": 8}, redis={"url": "redis://redis:6379/0"})
    assert (count_sharers(elsewhere), count_sharers(elsewhere, 8)) == (1, 8)
    environment[LAUNCHED] = "1"
    assert count_sharers(elsewhere) == count_sharers(elsewhere, 8) == 16 + 8 + 1


@pytest.mark.parametrize(("is_cuda", "level"), [(True, "INFO"), (False, "ERROR")])
def test_vllm_says_how_far_it_is_where_that_takes_minutes(environment, monkeypatch, is_cuda, level):
    monkeypatch.setattr(cuda, "has_cuda_vllm", lambda: is_cuda)
    configure_process(())
    assert environment["VLLM_LOGGING_LEVEL"] == level
    environment["VLLM_LOGGING_LEVEL"] = "DEBUG"
    configure_process(())
    assert environment["VLLM_LOGGING_LEVEL"] == "DEBUG"


class Started(Exception):
    """In place of the rest of a process."""


def refuse(*_: object) -> None:
    raise Started


@pytest.mark.parametrize("name", ["learner", "rollout", "evaluator"])
def test_the_memory_of_a_learner_can_grow_in_segments_and_that_of_vllm_keeps_its_own(environment, monkeypatch, name):
    monkeypatch.setattr(start, "require_gpus", refuse)
    monkeypatch.setattr(start, "lower_priority", lambda: None)
    with pytest.raises(Started):
        start.PROCESSES[name](config_of(eval={"every": 1}, learner={"ranks": 1}))
    expected = "expandable_segments:True" if name == "learner" else None
    assert environment.get("PYTORCH_CUDA_ALLOC_CONF") == expected


def cores_of(monkeypatch, name: str, config: Config) -> list[int]:
    """Those that a process is started with."""
    found: list[int] = []

    def configure(cores: Sequence[int], *_: object) -> None:
        found.extend(cores)
        raise Started

    monkeypatch.setattr(start, "configure_process", configure)
    with pytest.raises(Started):
        start.PROCESSES[name](config)
    return found


def test_a_rank_has_its_part_of_the_cores_of_its_node_however_ranks_were_dealt_out(environment, monkeypatch):
    """By `srun -m cyclic` a node has ranks 0 and 2, which had the same half, and nobody the other."""
    environment.update({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    config = config_of(learner={"ranks": 4, "nodes": 2, "cores": [0, 1, 2, 3]})
    assert cores_of(monkeypatch, "learner", config) == [1, 3]


def test_a_rank_whose_launcher_says_no_local_rank_has_a_gpu_of_its_own(environment, monkeypatch):
    """All ranks of a node took the first."""
    environment.update({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})
    cores_of(monkeypatch, "learner", config_of(learner={"ranks": 4, "nodes": 2}))
    assert environment["LOCAL_RANK"] == "1"


@pytest.mark.parametrize(("index", "cores"), [(None, [0, 1, 2, 3]), ("1", [1])])
def test_a_worker_that_launch_started_has_its_part_of_the_cores_one_by_hand_all(environment, monkeypatch, index, cores):
    if index is not None:
        environment["CUSEARCH_WORKER_INDEX"] = index
    config = config_of(rollout={"workers": 4, "cores": [0, 1, 2, 3]})
    assert cores_of(monkeypatch, "rollout", config) == cores


@pytest.mark.system
def test_vllm_knows_the_variable_that_says_that_no_user_chose_the_threads():
    from vllm.utils.torch_utils import OMP_NUM_THREADS_SET_BY_VLLM

    assert OMP_NUM_THREADS_SET_BY_VLLM == "VLLM_OMP_NUM_THREADS_SET_BY_VLLM"


def without_libnuma(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file: No such file or directory")


def test_a_machine_without_libnuma_is_told_how_to_get_it(monkeypatch):
    """Without it vLLM's CPU build loses its operators with a warning, and fails later with the name of one of them."""
    require_libnuma()
    monkeypatch.setattr("ctypes.CDLL", without_libnuma)
    with pytest.raises(ConfigError, match=r"needs libnuma: `sudo apt-get install libnuma1` \(libnuma\.so"):
        require_libnuma()
