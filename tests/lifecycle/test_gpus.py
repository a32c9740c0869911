"""Who takes which GPU. The cards are not there: `cuda_names` is told that they are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from cusearch_async.config import Config, load_config
from cusearch_async.errors import ConfigError
from cusearch_async.lifecycle import gpus
from cusearch_async.lifecycle.gpus import cuda_names, divide, list_gpus, may_share, take_for_engine
from cusearch_async.processes import start

EIGHT = tuple(map(str, range(8)))
TURNS = ("--run.colocate", "true", "--learner.reference", "cpu")
SHARE = ("--rollout.vllm.gpu_memory_utilization", "0.4")
PAIRS = ("--rollout.vllm.tensor_parallel_size", "2")
take_for_worker, take_for_evaluator = (partial(take_for_engine, role) for role in ("worker", "evaluator"))


def take_for_learner(config: Config, given: gpus.Gpus = ()) -> gpus.Gpus:
    return gpus.take_for_learner(config.learner, config.run.name, may_share(config), given)


@pytest.fixture
def config_of(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('[run]\nname = "mine"')
    return lambda *overrides: load_config(path, list(overrides))


@pytest.fixture(autouse=True)
def cards(tmp_path, monkeypatch):
    """Sets the GPUs that this process sees. Locks are this test's own, and are released with it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(gpus, "_held", [])

    def see(*names: str) -> None:
        monkeypatch.setattr(gpus, "has_card", lambda: bool(names))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names))

    yield see
    release()


def release() -> None:
    """As if this process had ended."""
    for locks in gpus._held:
        locks.close()
    gpus._held.clear()


def split(config: Config) -> tuple[object, ...]:
    division = divide(config)
    return division.learner, division.workers, division.evaluator


# --- launch -------------------------------------------------------------------------------------------


def test_without_gpus_nobody_takes_one(config_of, tmp_path):
    config = config_of("--eval.every", "1", "--rollout.workers", "2")
    assert split(config) == ((), [(), ()], ())
    assert take_for_learner(config) == take_for_worker(config) == take_for_evaluator(config) == ()
    assert not [*tmp_path.glob("cusearch-gpus-*")], "nothing is locked"


def test_what_is_not_named_is_divided_and_never_all_on_the_first(config_of, cards):
    cards("0", "1")
    assert split(config_of()) == (("1",), [("0",)], ())
    cards(*EIGHT)
    assert split(config_of("--learner.ranks", "4", "--rollout.workers", "4")) == (
        *(("4", "5", "6", "7"), [("0",), ("1",), ("2",), ("3",)], ()),
    )
    pairs = config_of("--learner.ranks", "2", *PAIRS, "--eval.every", "1")
    assert split(pairs) == (("6", "7"), [("0", "1")], ("4", "5"))


def test_who_takes_turns_leaves_nothing_to_the_other(config_of, cards):
    cards("0")
    assert split(config_of(*TURNS)) == (("0",), [("0",)], ())
    cards(*EIGHT)
    eight = ("--learner.ranks", "8", "--rollout.workers", "8")
    assert split(config_of(*TURNS, *eight)) == (EIGHT, [(gpu,) for gpu in EIGHT], ())


def test_what_is_named_is_taken_and_the_rest_keeps_away_from_it(config_of, cards):
    cards("0", "1")
    assert split(config_of("--learner.gpus", "[0]")) == (("0",), [("1",)], ())
    assert split(config_of("--rollout.gpus", "[1]")) == (("0",), [("1",)], ())
    cards("0")
    assert split(config_of("--rollout.gpus", "[0]", "--learner.gpus", "[0]", *SHARE)) == (("0",), [("0",)], ())
    cards(*EIGHT)
    groups = config_of("--rollout.gpus", "[3, 1, 2, 0, 5]", *PAIRS, "--rollout.workers", "2")
    assert split(groups)[1] == [("3", "1"), ("2", "0")]
    with pytest.raises(ConfigError, match=r"rollout\.gpus \[3\] must name at least 2 that are free.*workers \(2\)"):
        split(config_of("--rollout.gpus", "[3]", "--rollout.workers", "2"))


def test_gpus_that_are_named_for_two_who_may_not_share_them_are_refused(config_of, cards):
    """Before, vLLM found too little memory. As where `cusearch init` has written the lists, and one is changed."""
    cards(*EIGHT)
    engines = ("--rollout.gpus", "[0,1,2,3,4,5]", "--rollout.workers", "6", "--eval.every", "1", "--eval.gpus", "[6]")
    learner = ("--learner.gpus", "[4,5,6,7]", "--learner.ranks", "4")
    said = r"^learner.gpus \[4, 5, 6, 7\], rollout.gpus \[0, .*\], eval.gpus \[6\] name GPU 4, 5, 6 twice; give each"
    with pytest.raises(ConfigError, match=said):
        split(config_of(*engines, *learner))
    assert split(config_of(*engines, *learner, *SHARE))[0] == ("4", "5", "6", "7")
    assert split(config_of(*engines, "--learner.gpus", "[7]"))[0] == ("7",)
    fewer_ranks = ("--rollout.gpus", "[0,1,2,3,6,7]", "--rollout.workers", "6", *learner[:2], "--learner.ranks", "2")
    assert len(split(config_of(*fewer_ranks))[1]) == 6, "each rank has one of the GPUs that are named for the learner"
    unused = ("--rollout.gpus", "[0, 1]", "--learner.gpus", "[1]", "--eval.gpus", "[0]")
    assert split(config_of(*unused))[:2] == (("1",), [("0",)]), "by one worker and no evaluator"


def test_with_a_share_an_engine_has_the_learners_gpu_only_where_there_is_no_other(config_of, cards):
    config = config_of(*SHARE)
    cards("0")
    assert split(config) == (("0",), [("0",)], ())
    cards("0", "1")
    assert split(config) == (("1",), [("0",)], ())
    cards("0")
    with pytest.raises(ConfigError, match="this machine has 1 GPUs"):
        split(config_of(*SHARE, "--rollout.workers", "2"))


@pytest.mark.parametrize("name", ["atlas", "atlas-hard", "one-gpu-24gb", "one-gpu-48gb", "one-gpu-80gb"])
def test_configs_for_one_machine_start_on_one_gpu(cards, name):
    """atlas-hard with the share that its comment names: it is the study's world, and its runs are named by its text."""
    cards("0")
    assert split(load_config(Path(name), SHARE if name == "atlas-hard" else [])) == (("0",), [("0",)], ())


@pytest.mark.parametrize(
    ("overrides", "there"),
    [
        ((), ("0",)),
        (("--learner.ranks", "2"), ("0", "1")),
        (("--rollout.workers", "2"), ("0", "1")),
        (("--eval.every", "1"), ("0", "1")),
        (PAIRS, ("0", "1")),
    ],
)
def test_too_few_are_an_error_that_counts_them(config_of, cards, overrides, there):
    cards(*there)
    with pytest.raises(ConfigError, match=rf"this machine has {len(there)} GPUs \({', '.join(there)}\), too few for"):
        split(config_of(*overrides))


def test_two_launches_of_one_machine_have_different_gpus(config_of, cards):
    cards(*EIGHT)
    first = config_of()
    division = divide(first)
    take_for_learner(first, division.learner)
    take_for_worker(first, division.workers[0])
    assert split(config_of("--run.name", "yours", "--rollout.gpus", "[0, 2]")) == (("6",), [("2",)], ())


# --- one process alone --------------------------------------------------------------------------------


def test_a_host_with_workers_alone_keeps_nothing_for_a_learner(config_of, cards):
    cards("0", "1")
    config = config_of("--learner.ranks", "16", "--learner.nodes", "2", "--rollout.workers", "16")
    assert [take_for_worker(config), take_for_worker(config)] == [("0",), ("1",)]
    with pytest.raises(ConfigError, match=r"no GPU of rollout\.gpus is free: GPU 0 is taken by .*; GPU 1 is taken by"):
        take_for_worker(config)


def test_the_learners_gpus_of_other_hosts_are_this_hosts_workers(config_of, cards):
    cards(*EIGHT)
    config = config_of("--learner.ranks", "4", "--learner.gpus", "[0, 1, 2, 3]", "--rollout.workers", "16")
    assert [take_for_worker(config) for _ in EIGHT] == [(gpu,) for gpu in EIGHT]
    release()
    cards("0")
    alone = config_of("--rollout.workers", "16", "--rollout.gpus", "[0]")
    assert take_for_worker(alone) == ("0",), "a host names its own GPUs alone"


@pytest.mark.parametrize("order", ["learner first", "worker first"])
def test_on_a_host_with_a_learner_a_worker_takes_another_gpu(config_of, cards, order):
    cards("0", "1", "2")
    config = config_of("--learner.ranks", "2")
    takers = [take_for_learner, take_for_worker]
    taken = {taker: taker(config) for taker in (takers if order == "learner first" else reversed(takers))}
    assert (taken[take_for_learner], taken[take_for_worker]) == (("1", "2"), ("0",))
    with pytest.raises(ConfigError, match=r"GPU 1 is taken by process \d+, the learner of run mine; GPU 2 is"):
        take_for_worker(config)
    assert take_for_worker(config, ("1",)) == ("1",), "whom --gpu tells so shares it"


def test_an_engine_with_a_share_prefers_a_gpu_that_nobody_has(config_of, cards):
    cards("0", "1")
    config = config_of(*SHARE)
    assert take_for_learner(config) == ("1",)
    assert [take_for_worker(config), take_for_worker(config)] == [("0",), ("1",)]


def test_a_learner_does_not_join_a_worker_or_another_run_on_a_gpu(config_of, cards):
    cards("0")
    config = config_of()
    take_for_worker(config)
    with pytest.raises(ConfigError, match=r"GPU 0 is taken by process \d+ of run mine; stop it, or name other GPUs"):
        take_for_learner(config)
    assert take_for_learner(config_of(*SHARE)) == ("0",)
    release()
    take_for_learner(config)
    assert take_for_learner(config) == ("0",), "a rank, or the learner that takes over"
    with pytest.raises(ConfigError, match=r"GPU 0 is taken by process \d+, the learner of run mine; stop it"):
        take_for_learner(config_of("--run.name", "yours"))


def test_a_learner_that_starts_again_is_not_refused_because_of_its_own_evaluator(config_of, cards):
    cards("0")
    config = config_of(*SHARE, "--eval.every", "1")
    take_for_learner(config)
    assert take_for_evaluator(config) == ("0",)
    assert take_for_learner(config) == ("0",)
    with pytest.raises(ConfigError, match=r"GPU 0 is taken by process \d+, the evaluator of run mine; stop it"):
        take_for_learner(config_of())


@pytest.mark.parametrize(
    ("overrides", "advice"),
    [
        (("--eval.every", "1"), "set rollout.vllm.gpu_memory_utilization, the share"),
        ((*SHARE, "--eval.every", "1"), r"; set eval\.every to 0 and score checkpoints with cusearch eval, or name"),
        ((*SHARE, "--rollout.workers", "2"), r"; lower rollout\.workers, or name"),
        ((*TURNS, "--learner.ranks", "2"), r"; lower learner\.ranks, or name"),
    ],
)
def test_what_is_set_is_not_advised(config_of, cards, overrides, advice):
    cards("0")
    with pytest.raises(ConfigError, match=advice):
        split(config_of(*overrides))


def test_an_evaluator_takes_what_nobody_has(config_of, cards):
    cards("0", "1", "2")
    config = config_of("--eval.every", "1")
    assert (take_for_worker(config), take_for_learner(config), take_for_evaluator(config)) == (("0",), ("2",), ("1",))
    with pytest.raises(ConfigError, match=r"no GPU of eval\.gpus is free: .*GPU 1 is taken by .* the evaluator of run"):
        take_for_evaluator(config)
    assert take_for_evaluator(config_of("--eval.every", "1", "--eval.gpus", "[0]")) == ("0",)


def test_too_few_for_the_ranks_or_an_engine_are_an_error(config_of, cards):
    cards("0")
    with pytest.raises(ConfigError, match=r"the learner needs 2 GPUs on this machine, .* has 1 \(0\); lower"):
        take_for_learner(config_of("--learner.ranks", "2"))
    with pytest.raises(ConfigError, match=r"no group of 2 GPUs .* of rollout\.gpus is free: there are 1 \(0\)"):
        take_for_worker(config_of(*PAIRS))
    with pytest.raises(ConfigError, match=r"--gpu names GPU GPU-1a, but this process sees 1 "):
        take_for_worker(config_of(), ("GPU-1a",))  # GPU 0 by another name: it was taken twice
    cards("GPU-1a")
    with pytest.raises(ConfigError, match=r"no group of 2 GPUs .* there are 1 \(GPU-1a\)"):
        take_for_worker(config_of(*PAIRS), ("GPU-1a",))


@pytest.mark.parametrize(
    ("visible", "found"),
    [("2,3", ("2", "3")), ("GPU-1a, GPU-2b", ("GPU-1a", "GPU-2b")), ("", ()), ("-1", ()), ("1,-1,2", ("1",))],
)
def test_a_user_who_hides_gpus_is_obeyed(monkeypatch, visible, found):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(gpus, "has_card", lambda: True)
    assert (cuda_names(), list_gpus()) == (found, EIGHT[: len(found)])
    monkeypatch.setattr(gpus, "has_card", lambda: False)
    assert list_gpus() == (), "a launcher may name GPUs where there are none"


# --- GPUs are numbered as torch's cuda:N is -----------------------------------------------------------


class Started(Exception):
    """In place of the rest of a process."""


def started(*_: object) -> None:
    raise Started


def visible_to(name: str, config: Config, given: gpus.Gpus, monkeypatch) -> str:
    """CUDA_VISIBLE_DEVICES of a process that inherits this one's and has --gpu, if any is `given`."""
    with monkeypatch.context() as child:
        child.setattr(os, "environ", dict(os.environ))
        child.setattr(start, "require_gpus", started)
        with pytest.raises(Started):
            start.PROCESSES[name](config, given)
        return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize("names", [("4", "5"), ("1", "0"), ("GPU-1a", "GPU-2b"), ("MIG-GPU-1a/1/0", "MIG-GPU-1a/2/0")])
@pytest.mark.parametrize("named", [(), ("--learner.gpus", "[1]", "--rollout.gpus", "[0]")])
def test_a_process_has_the_visible_gpu_of_its_number(config_of, cards, names, named, monkeypatch):
    """Before, it was given the number itself, which on a shared machine is somebody else's GPU."""
    cards(*names)
    config = config_of(*named)
    division = divide(config)
    assert split(config) == (("1",), [("0",)], ())
    for learner, worker in ((division.learner, division.workers[0]), ((), ())):
        assert visible_to("learner", config, learner, monkeypatch) == names[1]
        assert visible_to("rollout", config, worker, monkeypatch) == names[0]
        release()


def test_the_other_ranks_inherit_what_the_first_has_not_narrowed_yet(config_of, cards, monkeypatch):
    cards("4", "5", "6")
    inherited = []

    @contextmanager
    def ranks(*_: object) -> Iterator[int]:
        inherited.append(os.environ["CUDA_VISIBLE_DEVICES"])
        yield 0

    monkeypatch.setattr(start, "other_ranks", ranks)
    assert visible_to("learner", config_of("--learner.ranks", "2"), ("1", "2"), monkeypatch) == "5,6"
    assert inherited == ["4,5,6"]


@pytest.mark.parametrize("take", [divide, take_for_learner, take_for_worker])
@pytest.mark.parametrize(("names", "seen"), [(("4", "5"), r"2 \(CUDA_VISIBLE_DEVICES=4,5\)"), ((), r"none \(.*=\)")])
def test_a_number_beyond_the_visible_gpus_is_an_error_that_names_both(config_of, cards, take, names, seen, monkeypatch):
    cards(*names)
    monkeypatch.setattr(gpus, "has_card", lambda: True)
    config = config_of("--learner.gpus", "[4]", "--rollout.gpus", "[4]")
    with pytest.raises(
        ConfigError, match=rf"^(learner|rollout)\.gpus names GPU 4, but this process sees {seen}; name "
    ):
        take(config)
    if take is not divide:
        with pytest.raises(ConfigError, match=rf"^--gpu names GPU 7, but this process sees {seen}"):
            take(config, ("7",))


def test_without_a_driver_cuda_says_what_is_not_there(config_of):
    config = config_of("--learner.gpus", "[4]", "--rollout.gpus", "[5]")
    assert split(config) == (("4",), [("5",)], ())
    assert (take_for_learner(config), take_for_worker(config)) == (("4",), ("5",))


@pytest.mark.parametrize("name", ["4", "GPU-4d"])
def test_who_sees_other_gpus_has_other_numbers_and_the_same_locks(config_of, cards, name):
    cards(name, "5")
    assert take_for_worker(config_of("--rollout.gpus", "[0]")) == ("0",)
    cards("3", name)
    assert split(config_of(*SHARE, "--run.name", "yours"))[1] == [("0",)]
    taken = rf"GPU 1 \({name} in CUDA_VISIBLE_DEVICES\) is taken by process \d+ of run mine; stop"
    with pytest.raises(ConfigError, match=taken):
        take_for_worker(config_of("--run.name", "yours", "--rollout.gpus", "[1]"))
    assert take_for_learner(config_of(*SHARE, "--learner.gpus", "[1]")) == ("1",)
    cards(name)
    with pytest.raises(ConfigError, match=rf"GPU 0 \({name} in CUDA_VISIBLE_DEVICES\) is taken by process"):
        take_for_worker(config_of(*SHARE, "--rollout.gpus", "[0]"))


def test_a_container_with_one_of_the_machines_cards_has_cudas_first(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "has_card", lambda: True)
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    for name in ("nvidia3", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / name).touch()
    assert list_gpus() == ("0",), "CUDA counts what it sees"
    (tmp_path / "nvidia7").touch()
    assert list_gpus() == ("0", "1")


# --- other processes ----------------------------------------------------------------------------------

TAKE = """
import sys
from functools import partial
from pathlib import Path
from cusearch_async.config import load_config
from cusearch_async.lifecycle import gpus
gpus.has_card = lambda: True
config = load_config(Path(sys.argv[1]), sys.argv[2:])
print("+".join(gpus.take_for_engine("worker", config)), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def worker(config_of, tmp_path):
    """Starts a process that takes GPUs as a worker and keeps them; returns it, and which."""
    started = []

    def start(*overrides: str) -> tuple[subprocess.Popen, str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        command = [sys.executable, "-c", TAKE, str(tmp_path / "config.toml"), *overrides]
        started.append(subprocess.Popen(command, text=True, env=os.environ, **pipes))
        return started[-1], started[-1].stdout.readline().strip()

    yield start
    for process in started:
        process.communicate()


def test_two_engines_never_have_the_same_gpu_and_a_killed_one_gives_it_back(config_of, cards, worker):
    cards("0", "1")
    first, has_first = worker()
    second, has_second = worker()
    assert (has_first, has_second) == ("0", "1")
    taken = f"GPU 0 is taken by process {first.pid} of run mine; GPU 1 is .* {second.pid}"
    with pytest.raises(ConfigError, match=taken):
        take_for_worker(config_of("--run.name", "yours"))
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert take_for_worker(config_of("--run.name", "yours")) == ("0",)


def test_a_group_that_is_half_taken_is_not_taken_and_leaves_its_other_half_free(config_of, cards, worker):
    cards("0", "1", "2", "3")
    worker("--rollout.gpus", "[1]")
    assert take_for_worker(config_of(*PAIRS, "--rollout.gpus", "[0, 1, 2, 3]")) == ("2", "3")
    assert take_for_worker(config_of("--rollout.gpus", "[0]")) == ("0",)


@pytest.mark.parametrize("how", ["a link", "of another user"])
def test_a_folder_of_locks_that_another_user_made_is_refused(cards, config_of, tmp_path, monkeypatch, how):
    """Or what is written into a lock would go wherever a link in it leads."""
    cards("0")
    if how == "a link":
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / f"cusearch-gpus-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    else:
        (tmp_path / "cusearch-gpus-1234567").mkdir()
        monkeypatch.setattr(os, "getuid", lambda: 1234567)
    with pytest.raises(ConfigError, match=r"cusearch-gpus-\d+ is not a folder of this user"):
        take_for_worker(config_of())
