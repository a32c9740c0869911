"""Who takes which GPU: what the config names, else a split of what is there; and no GPU for two engines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from cusearch_async.config import load_config
from cusearch_async.errors import ConfigError
from cusearch_async.lifecycle import gpus
from cusearch_async.lifecycle.gpus import claim, engine_groups, evaluator_gpus, learner_gpus, list_gpus

EIGHT = tuple(map(str, range(8)))


@pytest.fixture
def config_of(atlas_config):
    return lambda *overrides: load_config(atlas_config, list(overrides))


@pytest.fixture(autouse=True)
def locks(tmp_path, monkeypatch):
    """Locks of its own, released with the test."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(gpus, "_held", held := [])
    yield
    for each in held:
        each.close()


def split(config, there):
    return learner_gpus(config, there), engine_groups(config, there), evaluator_gpus(config, there)


def test_without_gpus_nobody_takes_one(config_of):
    assert split(config_of("--eval.every", "1"), ()) == ((), [], ())
    assert claim([], "rollout.gpus", "x") == ()


def test_what_is_not_named_is_divided_and_never_all_on_the_first(config_of):
    assert split(config_of(), ("0", "1")) == (("1",), [("0",)], ())
    assert split(config_of("--learner.ranks", "4", "--rollout.workers", "4"), EIGHT) == (
        *(("4", "5", "6", "7"), [("0",), ("1",), ("2",), ("3",)], ()),
    )
    pairs = config_of("--learner.ranks", "2", "--rollout.vllm.tensor_parallel_size", "2", "--eval.every", "1")
    assert split(pairs, EIGHT) == (("6", "7"), [("0", "1"), ("2", "3")], ("4", "5"))


def test_who_takes_turns_leaves_nothing_to_the_other(config_of):
    turns = config_of("--run.take_turns", "true", "--learner.reference", "cpu")
    assert split(turns, ("0",)) == (("0",), [("0",)], ())
    both = config_of("--run.take_turns", "true", "--learner.reference", "cpu", "--learner.ranks", "8")
    assert split(both, EIGHT) == (EIGHT, [(gpu,) for gpu in EIGHT], ())


def test_what_is_named_is_taken_and_the_rest_keeps_away_from_it(config_of):
    assert split(config_of("--learner.gpus", "[0]"), ("0", "1")) == (("0",), [("1",)], ())
    assert split(config_of("--rollout.gpus", "[1]"), ("0", "1")) == (("0",), [("1",)], ())
    shared = config_of("--rollout.gpus", "[0]", "--learner.gpus", "[0]")
    assert split(shared, ("0",)) == (("0",), [("0",)], ())
    groups = config_of("--rollout.gpus", "[3, 1, 2, 0, 5]", "--rollout.vllm.tensor_parallel_size", "2")
    assert engine_groups(groups, EIGHT) == [("3", "1"), ("2", "0")]


def test_a_node_of_a_learner_on_several_needs_none_for_engines(config_of):
    config = config_of("--learner.ranks", "16", "--learner.nodes", "2")
    assert learner_gpus(config, EIGHT) == EIGHT


@pytest.mark.parametrize(
    ("overrides", "there"),
    [
        ((), ("0",)),
        (("--learner.ranks", "2"), ("0", "1")),
        (("--rollout.workers", "2"), ("0", "1")),
        (("--eval.every", "1"), ("0", "1")),
        (("--rollout.vllm.tensor_parallel_size", "2"), ("0", "1")),
    ],
)
def test_too_few_are_an_error_that_counts_them(config_of, overrides, there):
    with pytest.raises(ConfigError, match=rf"this machine has {len(there)} GPUs \({', '.join(there)}\), too few for"):
        split(config_of(*overrides), there)


@pytest.mark.parametrize(
    ("visible", "found"), [("2,3", ("2", "3")), ("GPU-1a, GPU-2b", ("GPU-1a", "GPU-2b")), ("", ()), ("-1", ())]
)
def test_a_user_who_hides_gpus_is_obeyed(monkeypatch, visible, found):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(gpus, "has_card", lambda: True)
    assert list_gpus() == found
    monkeypatch.setattr(gpus, "has_card", lambda: False)
    assert list_gpus() == (), "a launcher may name GPUs where there are none"


def test_what_a_launcher_has_assigned_is_taken_if_it_is_what_the_ranks_need(config_of, monkeypatch):
    config = config_of("--learner.ranks", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ConfigError, match="too few"):
        learner_gpus(config, ("4", "5"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert learner_gpus(config, ("4", "5")) == ("4", "5")
    assert learner_gpus(config, ("3", "4", "5")) == ("4", "5")


CLAIM = """
import sys
from cusearch_async.lifecycle.gpus import claim
groups = [tuple(group.split("+")) for group in sys.argv[1].split(",")]
print("+".join(claim(groups, "rollout.gpus", "mine")), flush=True)
sys.stdin.read()
"""


def engine(groups: str) -> tuple[subprocess.Popen, str]:
    """A process that claims one of `groups` and keeps it; and which."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen([sys.executable, "-c", CLAIM, groups], text=True, env=os.environ, **pipes)
    return process, process.stdout.readline().strip()


def test_two_engines_never_have_the_same_gpu_and_a_killed_one_gives_it_back():
    first, has_first = engine("0,1")
    second, has_second = engine("0,1")
    assert (has_first, has_second) == ("0", "1")
    with pytest.raises(
        ConfigError, match=f"GPU 0 is taken by process {first.pid} of run mine; GPU 1 is .* {second.pid}"
    ):
        claim([("0",), ("1",)], "rollout.gpus", "yours")
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert claim([("0",), ("1",)], "rollout.gpus", "yours") == ("0",)
    second.communicate()
    first.stdin.close()
    first.stdout.close()


def test_a_group_that_is_half_taken_is_not_taken_and_leaves_its_other_half_free():
    process, _ = engine("1")
    assert claim([("0", "1"), ("2", "3")], "rollout.gpus", "x") == ("2", "3")
    assert claim([("0",)], "rollout.gpus", "x") == ("0",)
    process.communicate()
