"""What the learner takes: the LM head, loading with ZeRO-3, and the reference policy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from cusearch_async.config import STARTER
from cusearch_async.learner.matmul import TORCH
from cusearch_async.learner.model import SoftmaxInPieces
from tests.conftest import SLOW, free_port

pytestmark = pytest.mark.system

VOCABULARY, WIDTH, TEMPERATURE = 151_936, 32, 0.7
TOKENS, AT_ONCE = 640, 128


def by_definition(targets: torch.Tensor) -> Any:
    """All logits at once."""

    def compute(hidden: torch.Tensor, weight: torch.Tensor) -> Any:
        log_all = torch.log_softmax(hidden @ weight.T / TEMPERATURE, -1)
        return log_all.gather(-1, targets[:, None]).squeeze(-1), -(log_all.exp() * log_all).sum(-1)

    return compute


def in_pieces(targets: torch.Tensor, chunk: int, bonus: bool) -> Any:
    def compute(hidden: torch.Tensor, weight: torch.Tensor) -> Any:
        return SoftmaxInPieces.apply(hidden, weight, None, targets, TEMPERATURE, chunk, TORCH, True, bonus)

    return compute


def allocated_peak(run: Any) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    return int(np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]).max())


def gradients_of(compute: Any, hidden: torch.Tensor, weight: torch.Tensor, bonus: bool) -> list[torch.Tensor]:
    """Log-probabilities, entropies, and the gradients of `hidden` and `weight` of a weighted sum of them."""
    inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    chosen, entropy = compute(*inputs)
    weights = torch.randn(2, len(hidden), generator=torch.Generator().manual_seed(1)).to(hidden.dtype)
    ((chosen * weights[0]).sum() + (entropy * weights[1] * bonus).sum()).backward()
    return [chosen.detach(), entropy.detach(), *(tensor.grad for tensor in inputs)]  # type: ignore[misc]


def problem(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(count, WIDTH), 0.5 * torch.randn(VOCABULARY, WIDTH), torch.randint(VOCABULARY, (count,))


@pytest.mark.parametrize("bonus", [False, True])
def test_the_head_is_exact_at_150_000_tokens_of_vocabulary(bonus):
    """float32 in pieces against float64 without; float32 without pieces is further from it."""
    hidden, weight, targets = problem(160)
    wanted = gradients_of(by_definition(targets), hidden.double(), weight.double(), bonus)
    found = gradients_of(in_pieces(targets, 50, bonus), hidden, weight, bonus)
    for exact, got in zip(wanted, found, strict=True):
        assert got.dtype == torch.float32
        assert (got - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("bonus", [False, True])
def test_the_head_takes_a_fifth_of_the_memory_of_all_logits(bonus):
    hidden, weight, targets = problem(TOKENS)
    whole, pieces = (
        allocated_peak(lambda compute=compute: gradients_of(compute, hidden, weight, bonus))
        for compute in (by_definition(targets), in_pieces(targets, AT_ONCE, bonus))
    )
    assert pieces <= whole / 5


RETURNING = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""Memory that is freed goes back to the system, so that what a process owns is what it uses."""

LENGTHS = """
from cusearch_async.lifecycle.placement import configure_process

configure_process([])
import torch
from tests.system.peak_script import owned

layer = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
for length in range(8, 308):
    layer(torch.ones(length, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    before = before if length > 8 else owned()
print(owned() - before)
"""


def test_a_new_length_costs_no_memory_for_ever():
    """The kernels that oneDNN compiled for 300 lengths took 570 MB, and a run of 50 steps grew from 5 GiB to 10."""
    environment = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name} | RETURNING
    ran = subprocess.run([sys.executable, "-c", LENGTHS], env=environment, capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 150e6


RANK = """
import json, sys, threading
from pathlib import Path
from cusearch_async.lifecycle.placement import configure_process

configure_process([])
import deepspeed, torch, transformers
from safetensors.torch import load_file
from cusearch_async.config import load_config
from cusearch_async.learner.learner import DeepSpeedLearner
from cusearch_async.learner.ranks import Ranks
from cusearch_async.learner.plan import plan_update
from cusearch_async.learner.update import Update
from tests.system.learner_script import fixed_trajectories
from tests.system.peak_script import owned
from transformers import Qwen2ForCausalLM

model, out, *overrides = sys.argv[1:]
config = load_config(Path("configs/atlas.toml"), ["--model.path", model, *overrides])
ranks = Ranks(600)
ranks.sum(torch.ones(1))
before, peak, ended = owned(), 0, threading.Event()


def watch():
    global peak
    while not ended.wait(0.001):
        peak = max(peak, owned())


engine = deepspeed.initialize
at_initialize = []


def noting(*arguments, **named):
    at_initialize.append(max(peak, owned()) - before)  # all is loaded now; what follows are gradients and the optimizer
    return engine(*arguments, **named)


deepspeed.initialize = noting
watcher = threading.Thread(target=watch)
watcher.start()
learner = DeepSpeedLearner(config, ranks)
ended.set()
watcher.join()
stored = load_file(Path(model) / "model.safetensors")
same = True
for name, parameter in learner._module.model.named_parameters():
    with deepspeed.zero.GatheredParameters([parameter], enabled=config.learner.zero_stage == 3):
        same &= torch.equal(parameter.detach(), stored[name])
selected, advantages = fixed_trajectories()
update = Update(plan_update(selected, advantages, 0, config, ranks.rank, ranks.size), config.loss, learner._device)
with learner._reference() as reference:
    scores = torch.cat([*learner._score(reference, update.plan.micro_batches).values()])
facts = {"loading": at_initialize[0], "same": same, "scores": scores.tolist()}
Path(out).write_text(json.dumps(facts))
"""


def facts_of(folder: Path, model: Path, ranks: int, *overrides: str) -> list[dict[str, Any]]:
    """What each rank of a learner says of its own loading."""
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    settings = ("--loss.minibatch", "4", "--method.budget", "8", "--learner.ranks", str(ranks), *overrides)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(model), str(folder / f"{rank}.json"), *settings],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"} | RETURNING,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    for process in running:
        output, _ = process.communicate(timeout=300 * SLOW)
        assert process.returncode == 0, output
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module", params=["tied", "untied"])
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 MB of random weights."""
    folder = tmp_path_factory.mktemp(request.param)
    config = Qwen2Config(
        vocab_size=8000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=7,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=request.param == "tied",
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(STARTER).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_with_zero_3_no_rank_ever_holds_a_whole_model(large, tmp_path):
    size = (large / "model.safetensors").stat().st_size
    embedding = 8000 * 768 * 4
    for facts in facts_of(tmp_path, large, 2, "--learner.zero_stage", "3"):
        assert facts["same"], "gathered again, the weights are those of the file, bit for bit"
        assert facts["loading"] < size / 2 + 2 * embedding


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Each rank has the whole reference on its device."""
    return facts_of(tmp_path_factory.mktemp("plain"), STARTER, 2, "--learner.zero_stage", "1")


@pytest.mark.parametrize(
    "overrides",
    [
        ("--learner.zero_stage", "3"),
        ("--learner.zero_stage", "3", "--learner.reference", "cpu"),
        ("--learner.zero_stage", "1", "--learner.reference", "cpu"),
    ],
)
@pytest.mark.slow
def test_the_reference_says_the_same_wherever_it_waits(tmp_path, plain, overrides):
    """Bit for bit, in float32 on a CPU."""
    found = facts_of(tmp_path, STARTER, 2, *overrides)
    assert [facts["scores"] for facts in found] == [facts["scores"] for facts in plain]
    assert len(found[0]["scores"]) > 50
