"""The learner alone, on one GPU: how fast an update is, how much memory it takes, and how long weights take to leave.

    python -m tests.bench.bench_gpu [--smoke] [--without-deepspeed]

Random weights in the shapes of Qwen2.5-0.5B and 3B, made on the device: nothing is downloaded. Each case is a process
of its own. The peak of matrix products is measured in the same run. Figures also go to runs/bench/gpu.json. `--smoke`
takes seconds on a CPU, and shows only that all of this runs.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config

from cusearch_async.cli.preflight import sizing
from cusearch_async.cli.preflight.shapes import ModelShape, described, published
from cusearch_async.config import Config, load_config
from cusearch_async.learner.batching import micro_batches, minibatches
from cusearch_async.types import Trajectory
from tests.bench.plain_engine import learner_module
from tests.strategies import make_trajectory

PAPER = Path(__file__).parents[2] / "cusearch_async" / "configs" / "paper" / "base.toml"
FOLDER = Path("runs/bench")
SMOKE = Qwen2Config(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32768,
    tie_word_embeddings=True,
)
SHAPES = {
    "Qwen2.5-0.5B": published("Qwen/Qwen2.5-0.5B"),
    "Qwen2.5-3B": published("Qwen/Qwen2.5-3B"),
    "smoke": described(SMOKE),
}
TIMED_UPDATES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    shape: str
    tokens: int
    """Of a micro-batch; the longest trajectory is half as long."""
    packing: bool
    checkpointing: bool
    trajectories: int = 32
    publishes: bool = False
    with_deepspeed: bool = True


def cases(smoke: bool, with_deepspeed: bool) -> list[Case]:
    """Padded and packed with checkpointing, and packed without."""
    kinds = [(False, True), (True, True), (True, False)]
    sizes = [("smoke", 256, 6)] if smoke else [(shape, n, 32) for shape in list(SHAPES)[:2] for n in (4096, 8192)]
    return [
        Case(
            shape=shape,
            tokens=tokens,
            packing=packing,
            checkpointing=checkpointing,
            trajectories=count,
            publishes=packing and checkpointing and tokens in (256, 4096),
            with_deepspeed=with_deepspeed,
        )
        for shape, tokens, count in sizes
        for packing, checkpointing in kinds
    ]


# --- one case, in a process of its own ----------------------------------------------------------------


def settings(case: Case) -> Config:
    """The paper's, on one rank."""
    changes = {
        "--model.path": "atlas",  # its tokenizer only
        "--learner.ranks": 1,
        "--learner.gpus": [],
        "--learner.micro_batch_tokens": case.tokens,
        "--learner.packing": str(case.packing).lower(),
        "--learner.attention": "varlen" if case.packing else "sdpa",
        "--learner.gradient_checkpointing": str(case.checkpointing).lower(),
        "--learner.warmup_steps": 0,
        "--loss.minibatch": case.trajectories,
        "--method.budget": case.trajectories,
    }
    return load_config(PAPER, [word for key, value in changes.items() for word in (key, str(value))])


def ragged(case: Case) -> list[Trajectory]:
    """Trajectories of a tenth to a half of a micro-batch; of each, two thirds are sampled, in three turns."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(case.tokens // 10, case.tokens // 2, case.trajectories)
    lengths[0] = case.tokens // 2
    return [trajectory(ticket, int(length), rng, SHAPES[case.shape].vocab) for ticket, length in enumerate(lengths)]


def trajectory(ticket: int, length: int, rng: np.random.Generator, vocab: int, mean: float = -12) -> Trajectory:
    """Its log-probabilities are about `mean`: those of random weights are about minus the logarithm of `vocab`."""
    turns = np.arange(length) * 9 // length  # ninths: one not sampled, two sampled, three times
    sampled = turns % 3 != 0
    count = int(sampled.sum())
    return replace(
        make_trajectory(ticket, sampled=count, reward=float(ticket % 2)),
        token_ids=rng.integers(0, vocab, length).astype(np.int32),
        sampled=sampled,
        logprobs=rng.normal(mean, 0.1, count).astype(np.float32),
    )


def random_model(shape: ModelShape, dtype: str, attention: str) -> Any:
    """Made where it is used: random numbers for 3B parameters take minutes on a CPU."""
    from transformers import AutoModelForCausalLM

    options = {"dtype": getattr(torch, dtype), "attn_implementation": attention}
    with torch.device(device()):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(shape.config), **options)
    return model.eval()


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def measure(case: Case) -> dict[str, Any]:
    config, shape, selected = settings(case), SHAPES[case.shape], ragged(case)
    learner_of = learner_module(case.with_deepspeed)
    learner_of.load_causal_lm = lambda path, dtype, attention: random_model(shape, dtype, attention)
    from cusearch_async.learner.ranks import Ranks

    ranks = Ranks(600)
    learner = learner_of.DeepSpeedLearner(config, ranks)
    advantages = np.random.default_rng(1).normal(size=len(selected))
    learner.update(selected, advantages, 0)
    seconds = timed(lambda: learner.update(selected, advantages, 1), TIMED_UPDATES)
    lengths = [len(t.token_ids) for t in selected]
    sampled = sum(len(t.logprobs) for t in selected)
    flops = update_flops(shape, lengths, sampled)
    passes = passes_of(config)
    found = {
        **asdict(case),
        "parameters": shape.parameters,
        "update_s": seconds,
        "tokens_per_s": sum(lengths) / seconds,
        "flops_per_s": flops / seconds,
        "computed_flops_per_s": flops / seconds * passes / 3,
        "padding": _forward_tokens(case, lengths) / sum(lengths),
        **memory(case, shape, lengths),
    }
    if case.publishes:
        found |= publishing(learner)
    ranks.close()
    return found


def timed(work: Callable[[], object], times: int = 1) -> float:
    """Mean seconds, of the device's work too."""
    _wait()
    start = time.perf_counter()
    for _ in range(times):
        work()
    _wait()
    return (time.perf_counter() - start) / times


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def update_flops(shape: ModelShape, lengths: list[int], sampled: int) -> float:
    """Of forward and backward: 6 for each weight and token, of the LM head at sampled tokens only, and those of causal
    attention."""
    head = shape.vocab * shape.hidden
    layers = shape.parameters - head * (1 if shape.tied else 2)
    attention = 6 * shape.layers * shape.heads * shape.head_dim * sum(length**2 for length in lengths)
    return 6 * layers * sum(lengths) + 6 * head * sampled + attention


def _forward_tokens(case: Case, lengths: list[int]) -> int:
    """Tokens of all forward passes of an update, padding included."""
    (rows,) = minibatches(range(len(lengths)), case.trajectories, np.random.default_rng(0))
    groups = micro_batches([lengths[row] for row in rows], case.tokens, case.packing)
    own = [[lengths[rows[i]] for i in group] for group in groups]
    return sum(sum(group) if case.packing else max(group) * len(group) for group in own)


def memory(case: Case, shape: ModelShape, lengths: list[int]) -> dict[str, float]:
    """The peak that torch has allocated against what `cusearch check` expects of it, in GiB; none on a CPU."""
    expected = sizing.learner_memory(shape, settings(case), max(case.tokens, *lengths))
    found = {"expected_gib": (expected.peak - sizing.DEVICE_ALLOWANCE) / sizing.GIB}
    if torch.cuda.is_available():
        found["allocated_gib"] = torch.cuda.max_memory_allocated() / sizing.GIB
        found["reserved_gib"] = torch.cuda.max_memory_reserved() / sizing.GIB
    return found


def passes_of(config: Config) -> float:
    """Forward passes, and backward ones, which take twice as long: of the policy; of π_prox for all mini-batches but
    the first; of π_ref; and those that checkpointing computes again."""
    proximal = 1 - 1 / math.ceil(config.method.budget / config.loss.minibatch)
    return 3 + proximal + bool(config.loss.kl_coef) + config.learner.gradient_checkpointing


def publishing(learner: Any) -> dict[str, float]:
    """Seconds until the weights are lent, and to write them as a version on the disk and in shared memory, which goes
    on beside the next update."""
    from cusearch_async.weights.folder import WeightStore

    canary = learner.canary()
    began = time.perf_counter()
    lent = learner.lend()
    found = {"lend_s": time.perf_counter() - began}
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, place in (("disk", FOLDER), ("shared", Path("/dev/shm"))):
        with tempfile.TemporaryDirectory(dir=place) as folder:
            store = WeightStore(Path(folder))
            found[f"publish_{name}_s"] = timed(lambda store=store: store.publish(0, 1, lent.tensors, canary))
    lent.release()
    return found | {"published_gb": sum(t.nbytes for t in lent.tensors.values()) / 1e9}


# --- all cases ----------------------------------------------------------------------------------------


def matmul_peak(size: int) -> float:
    """FLOP/s of bfloat16 matrix products, the best of three."""
    left, right = (torch.randn(size, size, device=device(), dtype=torch.bfloat16) for _ in range(2))
    timed(lambda: left @ right, 3)
    return 2 * size**3 / min(timed(lambda: left @ right, 10) for _ in range(3))


def in_a_process(case: Case) -> dict[str, Any]:
    """The figures of a case, or why it has none."""
    command = [sys.executable, "-m", "tests.bench.bench_gpu", "--case", json.dumps(asdict(case))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    lines = done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"]
    reason = next((line for line in reversed(lines) if "Error" in line), lines[-1])
    return {**asdict(case), "failed": reason}


def table_of(figures: dict[str, Any]) -> Table:
    table = Table(title=f"{figures['device']}, {figures['engine']}; matmul peak {figures['peak_tflops']:.0f} TFLOP/s")
    for heading in ("shape", "micro-batch", "layout", "recompute"):
        table.add_column(heading)
    for heading in ("tokens/s", "MFU", "computed", "GiB", "check"):
        table.add_column(heading, justify="right")
    for row in figures["cases"]:
        named = (row["shape"], str(row["tokens"]), "packed" if row["packing"] else "padded")
        recompute = "yes" if row["checkpointing"] else "no"
        if "failed" in row:
            table.add_row(*named, recompute, row["failed"])
            continue
        peak = figures["peak_tflops"] * 1e12
        shares = (f"{row[key] / peak:.1%}" for key in ("flops_per_s", "computed_flops_per_s"))
        allocated = f"{row['allocated_gib']:.1f}" if "allocated_gib" in row else "-"
        table.add_row(*named, recompute, f"{row['tokens_per_s']:.0f}", *shares, allocated, f"{row['expected_gib']:.1f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--without-deepspeed", action="store_true")
    parser.add_argument("--case")
    arguments = parser.parse_args()
    if arguments.case:
        found = measure(Case(**json.loads(arguments.case)))
        sys.stdout.write("\n" + json.dumps(found) + "\n")
        return
    with_deepspeed = find_spec("deepspeed") is not None and not arguments.without_deepspeed
    all_cases = cases(arguments.smoke, with_deepspeed)
    stage = settings(all_cases[0]).learner.zero_stage
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    figures = {
        "device": name,
        "torch": torch.__version__,
        "engine": f"DeepSpeed ZeRO-{stage}" if with_deepspeed else "plain AdamW, without DeepSpeed",
        "peak_tflops": matmul_peak(256 if arguments.smoke else 8192) / 1e12,
        "cases": [],
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    for case in all_cases:
        figures["cases"].append(in_a_process(case))
        (FOLDER / "gpu.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")  # also of a run cut short
    console = Console(width=140)
    console.print(table_of(figures))
    for row in figures["cases"]:
        if "lend_s" in row:
            console.print(
                f"{row['shape']}: {row['published_gb']:.2f} GB lent in {row['lend_s']:.3f} s, written to disk in "
                f"{row['publish_disk_s']:.2f} s, to /dev/shm in {row['publish_shared_s']:.2f} s"
            )
    console.print(f"figures in {FOLDER / 'gpu.json'}")


if __name__ == "__main__":
    main()
