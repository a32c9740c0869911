"""Runs with LoRA: Redis, retriever, vLLM and DeepSpeed; a learner that is killed goes on bit for bit."""

from __future__ import annotations

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from cusearch_async.config import STARTER
from cusearch_async.weights.folder import WeightStore
from tests.system.conftest import Run
from tests.system.conftest import finish as finish_run
from tests.system.test_crashes import STEPS, Lives, finish, lives  # noqa: F401  (a fixture)

pytestmark = pytest.mark.system

RANK = 4


def test_a_run_trains_an_adapter_and_its_workers_follow_it(run: Run):
    lora = {"learner__lora__rank": RANK, "learner__lr": 1e-3, "loss__minibatch": 8}
    status, output = finish_run(run.cusearch("launch", run__steps=3, **lora))
    assert status == 0, output
    rows = run.metrics()
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[0]["train/kl_reference"] < 1e-6 < rows[2]["train/kl_reference"], "the reference is the model itself"
    assert rows[0]["off_policy/logprob_difference_max"] < 1e-3, "vLLM has the learner's log-probabilities"
    assert all(row["off_policy/weight_mean"] > 0.5 for row in rows)
    log = run.log("rollout-0")
    assert "loaded weights v000000-e1" in log
    assert "loaded weights v000001-e1" in log, "the canary agrees after each swap"

    store = WeightStore(run.folder / "weights")
    newest = store.verify("v000003-e1")
    assert newest.adapter is not None
    assert (newest.adapter["r"], newest.adapter["lora_alpha"]) == (RANK, 32)
    checkpoint = run.folder / "checkpoints" / "step000003-e1"
    published = load_file(store.directory("v000003-e1") / newest.file)
    saved = load_file(checkpoint / "adapter" / newest.file)
    assert all(torch.equal(published[name], saved[name]) for name in published.keys() | saved.keys())
    start, merged = load_file(STARTER / "model.safetensors"), load_file(checkpoint / "model" / "model.safetensors")
    assert merged.keys() == start.keys()
    changed = {name for name in start if not torch.equal(start[name].float(), merged[name])}
    assert changed == {name for name in start if "_proj.weight" in name}

    status, output = finish_run(run.cusearch("launch", run__steps=4, **lora | {"learner__lora__rank": 8}), 60)
    assert status == 1
    assert "does not match run 'atlas': learner.lora.rank is 8 here and 4 in the run" in output


@pytest.mark.parametrize("point", ["mid-update, publishing", pytest.param("mid-checkpoint", marks=pytest.mark.slow)])
def test_a_killed_learner_goes_on_with_the_same_adapter_bit_for_bit(lives: Lives, tmp_path, point):  # noqa: F811
    whole = Lives(tmp_path / "whole")
    try:
        for life in (whole, lives):
            life.overrides += ["--learner.lora.rank", str(RANK), "--learner.lr", "1e-3"]
        first, dying = whole.start("none", 0), lives.start(point, 3, "--learner.checkpoint_every", "1")
        whole.feed()
        lives.feed()
        finish(first, 0)
        finish(dying, -signal.SIGKILL)
        assert any((lives.folder / "checkpoints").glob("step*"))
        finish(lives.start("none", 0), 0)
        uninterrupted, weights = whole.weights(), lives.weights()
    finally:
        whole.end()
    assert all(torch.equal(weights[name], uninterrupted[name]) for name in weights.keys() | uninterrupted.keys())
    newest = max((lives.folder / "checkpoints").glob(f"step{STEPS:06d}-e*"))
    files = json.loads((newest / "state.json").read_text())["files"]
    assert {"adapter/adapter_config.json", "adapter/adapter_model.safetensors", "model/model.safetensors"} <= set(files)
