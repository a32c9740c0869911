"""The benchmark for GPUs runs, on a CPU and on nothing but a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.bench.bench_gpu import cases, passes_of, settings
from tests.conftest import SLOW

pytestmark = [pytest.mark.system, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


def bench(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.bench_gpu", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300 * SLOW,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_smoke_run_measures_every_case(tmp_path):
    output = bench(tmp_path, "--smoke", "--without-deepspeed")
    figures = json.loads((tmp_path / "runs" / "bench" / "gpu.json").read_text())
    assert figures["engine"] == "plain AdamW, without DeepSpeed"
    assert [(row["packing"], row["checkpointing"]) for row in figures["cases"]] == [
        (False, True),
        (True, True),
        (True, False),
    ]
    assert not [row["failed"] for row in figures["cases"] if "failed" in row]
    padded, packed, _ = figures["cases"]
    assert padded["padding"] > packed["padding"] == 1
    assert packed["published_gb"] > 0
    assert packed["publish_shared_s"] > 0
    assert "smoke" in output


def test_the_passes_of_a_case_are_those_that_its_learner_makes():
    """π_prox was counted, which an update of one mini-batch does not compute."""
    case = cases(smoke=False, with_deepspeed=True)[1]
    config = settings(case)
    assert config.loss.minibatch == config.method.budget
    assert passes_of(config) == 3 + 1 + 1
    half = config.model_copy(update={"loss": config.loss.model_copy(update={"minibatch": case.trajectories // 2})})
    assert passes_of(half) == 3 + 1 / 2 + 1 + 1
    plain = config.model_copy(update={"loss": config.loss.model_copy(update={"kl_coef": 0.0})})
    assert passes_of(plain) == 3 + 1


def test_a_case_runs_on_deepspeed(tmp_path):
    packed = cases(smoke=True, with_deepspeed=True)[1]
    found = json.loads(bench(tmp_path, "--case", json.dumps(asdict(packed))).splitlines()[-1])
    assert found["with_deepspeed"]
    assert found["tokens_per_s"] > 0


def test_a_case_that_fails_is_named_in_the_figures(tmp_path):
    from tests.bench.bench_gpu import Case, in_a_process

    impossible = Case(shape="no such shape", tokens=256, packing=True, checkpointing=True, with_deepspeed=False)
    assert in_a_process(impossible)["failed"] == "KeyError: 'no such shape'"
