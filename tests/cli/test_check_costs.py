"""`cusearch check`: a GPU for learner and engine, the host's memory, and disk."""

from __future__ import annotations

import pytest

from cusearch_async.config import load_config
from cusearch_async.machine import Memory
from tests.cli.test_check import CONFIGS, findings

pytestmark = pytest.mark.system  # it builds models of transformers, which takes long


@pytest.mark.parametrize(("share", "status", "room"), [("0.5", "ok", "12"), ("0.7", "error", "7.2")])
def test_on_a_shared_gpu_the_learner_has_what_the_engine_leaves(share, status, room):
    overrides = ("--rollout.vllm.gpu_memory_utilization", share)
    found = findings(*overrides, path=CONFIGS / "one-gpu-24gb.toml", gib=24)
    assert "0 shared" in found["GPUs"].text
    assert found["learner memory"].status == status
    assert f"needs 7.8 of {room} GiB per GPU" in found["learner memory"].text
    assert "the other" in found["learner memory"].text


@pytest.mark.parametrize(("mib", "status"), [(4096, "ok"), (8192, "warning"), (12288, "error")])
def test_a_kv_cache_of_a_given_size_must_fit_into_the_engines_share(mib, status):
    cache = ("--rollout.vllm.kv_cache_memory_bytes", str(mib << 20))
    found = findings(*cache, path=CONFIGS / "one-gpu-24gb.toml", gib=24)["KV cache"]
    assert found.status == status
    assert ("more than 50% (rollout.vllm.gpu_memory_utilization) of a GPU" in found.text) == (status != "ok")


def test_where_learner_and_engine_take_turns_each_has_the_whole_gpu():
    turns = ("--run.colocate", "true", "--learner.reference", "cpu", "--learner.deepspeed.zero_optimization", "{}")
    found = findings(*turns, path=CONFIGS / "one-gpu-48gb.toml", gib=48)
    assert "0 in turn" in found["GPUs"].text
    assert found["learner memory"].status == "ok"
    assert "of 46.5 GiB per GPU" in found["learner memory"].text
    assert "a sleeping engine is assumed to keep 1.5 GiB" in found["learner memory"].text
    alone = findings(*turns[2:], path=CONFIGS / "one-gpu-48gb.toml", gib=48)
    assert alone["learner memory"].status == "error", "half of the GPU is too little for the optimizer"


def test_every_config_for_one_gpu_has_a_card_in_its_name():
    assert {path.stem for path in CONFIGS.glob("one-gpu-*")} == {f"one-gpu-{gib}gb" for gib in (24, 48, 80)}
    for gib in (24, 48, 80):
        config = load_config(CONFIGS / f"one-gpu-{gib}gb.toml")
        assert config.learner.gpus == config.rollout.gpus == (0,)
        assert findings(path=CONFIGS / f"one-gpu-{gib}gb.toml", gib=gib / 2)["learner memory"].status == "error"


def test_the_host_and_the_disk_are_reported():
    found = findings()
    assert "4 ranks on one machine: 46.0 GiB while loading, 0.0 GiB permanently" in found["host memory"].text
    assert "40.2 GiB while a checkpoint is written; engines 32.0 GiB for new weights" in found["host memory"].text
    assert "146.0 GiB needed for 3 checkpoints of 40.2 GiB and 4 weight versions of 6.3 GiB" in found["disk"].text
    assert {found[what].status for what in ("host memory", "disk")} <= {"ok", "too small"}


def test_a_host_that_is_too_small_is_said_and_no_error(monkeypatch):
    monkeypatch.setattr("cusearch_async.cli.preflight.memory.usable_memory", lambda: Memory(4 << 30, 0))
    found = findings()["host memory"]
    assert (found.status, "78.0 GiB needed, 4.0 GiB there" in found.text) == ("too small", True)
    assert findings("--model.dtype", "bfloat16", path=CONFIGS / "atlas.toml")["disk"].status == "ok"
