"""What the targets of the Makefile run, as `make -n` prints it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ((), "runs/lm"),
        (("SEED=1",), "runs/lm1"),
        (("MODEL=Qwen/Qwen2.5-0.5B",), "runs/lm-Qwen-Qwen2.5-0.5B"),
        (("MODEL=models/qwen/",), "runs/lm-models-qwen"),
        (("MODEL=runs/lm/smollm2/",), "runs/lm"),
        (("SEED=1", "LM=runs/mine"), "runs/mine"),
    ],
)
def test_each_seed_and_model_of_demo_lm_has_its_folder(variables, folder):
    """The second one met the warm start of the first, and was refused."""
    done = subprocess.run(["make", "-n", "demo-lm", *variables], cwd=ROOT, capture_output=True, text=True, check=True)
    words = done.stdout.split()
    written = [words[place + 1] for place, word in enumerate(words) if word in ("--output", "--run.folder")]
    assert written == [f"{folder}/{name}" for name in ("demonstrations.jsonl", "warm", "run")]
    assert not [line for line in done.stdout.splitlines() if "atlas-prose" in line and "cores" in line]
    assert re.search(rf"--model\.path {re.escape(folder)}/warm/model ", done.stdout)


def test_demo_lm_has_the_cores_and_the_data_type_of_the_machine():
    """It was float32 on one core for each side everywhere, also where bfloat16 is much faster."""
    command = ["make", "-n", "-B", "demo-lm"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    (written,) = (place for place, line in enumerate(lines) if "cusearch init runs/lm/laptop.toml --gpus 0" in line)
    used = [place for place, line in enumerate(lines) if "cusearch" in line and "atlas-prose" in line]
    assert len(used) == 3
    assert written < used[0]
    assert all(" runs/lm/laptop.toml atlas-prose " in lines[place] for place in used)
