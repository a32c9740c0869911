"""The update on recorded pools, against three others: the same passes in transformers and torch alone; PREVIOUS, an
earlier commit; TRL's GRPOTrainer.

    python -m tests.bench.bench_learner

Each side is a process with one thread (`update_case.py`, `trl_case.py`), and they take turns: an update of one, then
of the next. Figures are CPU seconds, medians and ranges of ROUNDS rounds. Where TRL is compared with, this learner is
there with `learner.compile` and `learner.packing`, too. The memory is that of the LM head with a vocabulary of
152,000, forward and backward, against all its logits at once. All go to runs/bench/learner.json.

The pools are the steps 6 and 11 of a run of configs/atlas.toml (`record_pools.py`): 96 trajectories, for the starter
policy of 1 M parameters, in three mini-batches. "Equal" are 96 random ones of 300 tokens in one mini-batch, none of
them alike. The models of 55 M parameters and with V = 152,000 are random, and train on the first six of step 6.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from cusearch_async.config import STARTER
from tests.bench import figures
from tests.bench.record_pools import write_pool
from tests.bench.update_case import SETTINGS
from tests.strategies import make_trajectory

OUTPUT = Path("runs/bench/learner.json")
ROOT = Path(__file__).parents[2]
POOLS = Path(__file__).parent / "pools"
PREVIOUS = "3118a3f"
"""An earlier commit, whose sides are run by its own scripts: its names are others."""
ROUNDS = 3
FEW = {"loss.minibatch": 2, "method.budget": 6, "learner.zero_stage": 0}
"""ZeRO 0, as the bare side has no second copy of the parameters either."""
SHAPES = {
    "55 M": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 13},
    "V = 152k": {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 152_000},
}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 2048}


def make_model(folder: Path, shape: Mapping[str, int]) -> None:
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(STARTER)
    config = Qwen2Config(**{"vocab_size": len(tokenizer)} | HEADS | shape, tie_word_embeddings=True)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_equal_pool(path: Path) -> None:
    """Trajectories of 300 tokens, of which every other 25 are sampled after a prompt of 100."""
    rng = np.random.default_rng(0)
    sampled = np.arange(300) >= 100
    sampled &= np.arange(300) // 25 % 2 == 0
    trajectories = [
        replace(
            make_trajectory(ticket, sampled=int(sampled.sum())),
            token_ids=rng.integers(5, 370, 300).astype(np.int32),
            sampled=sampled,
        )
        for ticket in range(96)
    ]
    write_pool(path, trajectories, rng.normal(size=96))


def cases(folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> what `update_case.py` and `trl_case.py` read; TRL is compared with on the starter policy."""
    make_equal_pool(folder / "equal.npz")
    whole = {"loss.minibatch": 96}
    starter: dict[str, tuple[Path, dict[str, Any]]] = {
        "step 6": (POOLS / "step06.npz", {}),
        "step 11": (POOLS / "step11.npz", {}),
        "equal": (folder / "equal.npz", whole),
    }
    found = {
        f"{name}, β = {kl_coef}": {
            "pool": str(pool),
            "trajectories": 96,
            "settings": settings | {"loss.kl_coef": kl_coef},
            "has_trl": True,
        }
        for name, (pool, settings) in starter.items()
        for kl_coef in (0.001, 0)
    }
    for name, shape in SHAPES.items():
        make_model(folder / name, shape)
        settings = FEW | {"model.path": str(folder / name)}
        found[name] = {"pool": str(POOLS / "step06.npz"), "trajectories": 6, "settings": settings, "has_trl": False}
    return found


def previous_tree(folder: Path) -> Path:
    """The files of an earlier commit."""
    command = ["git", "-C", str(ROOT), "archive", PREVIOUS, "cusearch_async", "tests", "configs"]
    archive = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return folder


@dataclass(frozen=True, slots=True)
class Side:
    """What a process is started as."""

    python: str
    script: str
    kind: str
    tree: Path
    """Where its script and the cusearch_async are that it imports."""


LEARNER, COMPILED, PACKED, PACKED_SDPA, BARE = (Side(sys.executable, "update_case.py", kind, ROOT) for kind in SETTINGS)
TRL = Side(str(ROOT / ".venv-trl" / "bin" / "python"), "trl_case.py", "trl", ROOT)
"""Its environment is made by `make bench-learner`."""


@contextmanager
def started(side: Side, case: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has made its first update, and waits."""
    command = [side.python, str(side.tree / "tests" / "bench" / side.script), side.kind, str(case)]
    env = os.environ | {"PYTHONPATH": str(side.tree), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, cwd=side.tree, env=env, text=True, bufsize=1, stderr=log, **pipes) as process,
    ):
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "ready\n":
                raise EOFError(process)
            yield process
        except EOFError as error:
            if error.args != (process,):
                raise
            log.seek(0)
            raise RuntimeError(f"{side.kind} of {side.tree} has ended: {log.read()[-2000:]}") from error
        finally:
            process.kill()


def ask(process: subprocess.Popen[str]) -> str:
    """Have a side do its work once; its answer. Raises: EOFError when it has ended, for `started`."""
    assert process.stdin is not None and process.stdout is not None  # noqa: PT018
    with suppress(BrokenPipeError):
        process.stdin.write("\n")
        process.stdin.flush()
    if not (line := process.stdout.readline()):
        raise EOFError(process)
    return line


def measure(case: dict[str, Any], sides: Mapping[str, Side], folder: Path, count: int) -> dict[str, list[float]]:
    """Seconds of each side in each of `count` rounds."""
    path = folder / "case.json"
    path.write_text(json.dumps(case))
    with ExitStack() as stack:
        running = {name: stack.enter_context(started(side, path)) for name, side in sides.items()}
        rounds = [{name: float(ask(process)) for name, process in running.items()} for _ in range(count)]
    return {name: [of_round[name] for of_round in rounds] for name in running}


def head_memory() -> float:
    """Bytes of the learner's LM head at its peak, over those of all logits at once."""
    from tests.system.test_memory import TOKENS, allocated_peak, by_definition, gradients_of, in_pieces, problem

    hidden, weight, targets = problem(TOKENS)
    pieces, all_at_once = (
        allocated_peak(lambda compute=compute: gradients_of(compute, hidden, weight, bonus=False))
        for compute in (in_pieces(targets, 64, bonus=False), by_definition(targets))
    )
    return pieces / all_at_once


def over(seconds: dict[str, list[float]], other: str, side: str = "learner") -> float:
    """How many times as fast as the `other` side this learner is: the median of the ratios within a round."""
    return statistics.median(theirs / ours for theirs, ours in zip(seconds[other], seconds[side], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        previous = Side(sys.executable, "update_case.py", "learner", previous_tree(folder / "previous"))
        for name, case in cases(folder).items():
            sides = {"learner": LEARNER, "bare": BARE, "previous": previous}
            if case["has_trl"]:
                sides |= {"compiled": COMPILED, "packed": PACKED, "packed_sdpa": PACKED_SDPA, "trl": TRL}
            found[name] = measure(case, sides, folder, arguments.rounds)

    def over_trl(pools: str, side: str) -> float:
        return min(over(seconds, "trl", side) for name, seconds in found.items() if pools in name)

    first, last = found["step 6, β = 0.001"], found["step 11, β = 0.001"]
    ratios = {
        "equal_passes_over_bare": min(over(first, "bare"), over(last, "bare")),
        "update_over_previous": over(last, "previous"),
        "update_over_previous_step_6": over(first, "previous"),
        "over_trl_ragged": over_trl("step", "learner"),
        "over_trl_equal": over_trl("equal", "learner"),
        "over_trl_ragged_compiled": over_trl("step", "compiled"),
        "over_trl_equal_compiled": over_trl("equal", "compiled"),
        "m55_equal_passes_over_bare": over(found["55 M"], "bare"),
        "v152k_equal_passes_over_bare": over(found["V = 152k"], "bare"),
        "v152k_memory_over_direct": head_memory(),
        "seconds": found,
    }
    figures.add(arguments.out, ratios)
    Console().print(table(found))
    for name, value in ratios.items():
        if isinstance(value, float):
            Console().print(f"{name} {value:.2f}")
    Console().print(f"figures in {arguments.out}")


def table(found: Mapping[str, Mapping[str, list[float]]]) -> Table:
    printed = Table(title="CPU seconds of an update: median (least to most)")
    headings = {"learner": "this learner", "bare": "same passes, bare", "previous": f"commit {PREVIOUS}", "trl": "TRL"}
    headings |= {"compiled": "learner.compile", "packed": "packed, varlen", "packed_sdpa": "packed, sdpa"}
    printed.add_column("")
    for heading in headings.values():
        printed.add_column(heading, justify="right")
    for name, seconds in found.items():
        cells = [
            f"{statistics.median(s):.2f} ({min(s):.2f}-{max(s):.2f})" if (s := seconds.get(side)) else ""
            for side in headings
        ]
        printed.add_row(name, *cells)
    return printed


if __name__ == "__main__":
    main()
