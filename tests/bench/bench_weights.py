"""What publishing weights costs the learner and the workers, at the size of Qwen2.5-0.5B (1.26 GB in bfloat16).

    python -m tests.bench.bench_weights

The model is random. The learner is the real one on DeepSpeed, with updates of a few short trajectories; its stop is
what it waits for the publication: to lend its weights, and before its next optimizer step until they are copied. Beside
it the same weights are written as this project did before, in the same run: copied, `save_file`, hashed, synced. The
engine is vLLM's. These figures are medians of VERSIONS versions. Then versions of 1, 55 and 500 million parameters
(whole, differences, adapters) go by a folder, HTTP and an object store (weight_ways.py). All figures go to
runs/bench/weights.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cusearch_async.config import STARTER, Config, load_config
from cusearch_async.lifecycle.placement import configure_process
from tests.conftest import free_port

OUTPUT = Path("runs/bench/weights.json")
ATLAS = Path(__file__).parents[2] / "configs" / "atlas.toml"
VERSIONS = 5
MACHINES = 8
GAPS = 1000
SMOKE = "smoke"
SHAPE = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
"""Qwen2.5-0.5B's. Source: its config.json on the Hugging Face Hub."""
TINY = SHAPE | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 4096}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1}


def settings(folder: Path, **more: str) -> Config:
    given = {
        "model.path": folder / "model",
        "model.dtype": "bfloat16",
        "run.folder": folder / "run",
        "loss.kl_coef": 0,
        "loss.minibatch": 8,
        "method.budget": 8,
        "learner.cores": "[]",
        "rollout.cores": "[]",
    } | {key.replace("__", "."): value for key, value in more.items()}
    return load_config(ATLAS, [word for key, value in given.items() for word in (f"--{key}", str(value))])


def make_model(folder: Path, shape: dict[str, Any]) -> None:
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    Qwen2ForCausalLM(Qwen2Config(**shape)).save_pretrained(folder / "model")
    torch.set_default_dtype(torch.float32)
    AutoTokenizer.from_pretrained(STARTER).save_pretrained(folder / "model")


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# --- the learner --------------------------------------------------------------------------------------


async def measure_learner(config: Config) -> dict[str, Any]:
    from cusearch_async.learner.learner import DeepSpeedLearner
    from cusearch_async.learner.ranks import Ranks
    from cusearch_async.training.background import in_thread
    from cusearch_async.training.publisher import Publisher
    from cusearch_async.transport.limits import limits_of
    from cusearch_async.transport.memory import MemoryBuffer, MemoryRun
    from cusearch_async.weights.folder import WeightStore
    from tests.system.learner_script import fixed_trajectories

    selected, advantages = fixed_trajectories(8, 36)
    learner = DeepSpeedLearner(config, Ranks(600))
    learner._lent = lent = TimedLock(learner._lent)
    buffer, store = MemoryBuffer(MemoryRun(), limits_of(config)), WeightStore(config.weights_folder)
    await buffer.recover(0)
    stops, updates, canaries, publications = [], [], [], []
    async with in_thread(learner) as trainer, Publisher(trainer, buffer, store) as publisher:
        await trainer.update(selected, advantages, 0)
        for step in range(VERSIONS):
            lent.waited_s, began = 0.0, time.perf_counter()
            await publisher.publish(step)
            lending = time.perf_counter() - began
            began = time.perf_counter()
            await trainer.update(selected, advantages, step)
            updates.append(time.perf_counter() - began)
            stops.append(lending + lent.waited_s)
            await publisher.finish()
            publications.append(publisher.took_s)
            began = time.perf_counter()
            await trainer.canary()
            canaries.append(time.perf_counter() - began)
    tensors = learner.lend().tensors
    return {
        "published_gb": sum(tensor.nbytes for tensor in tensors.values()) / 1e9,
        "learner_stop_s_500m": statistics.median(stops),
        "learner_stop_s_all": stops,
        "lent_s_500m": statistics.median(lent.lent_s),
        "canary_s": statistics.median(canaries),
        "publishing_s": statistics.median(publications),
        "update_s": statistics.median(updates),
        "before_s": statistics.median(seconds(lambda: as_before(tensors, config.folder)) for _ in range(3)),
        "newest": sorted(path.name for path in store.folder.iterdir())[-1],
    }


class TimedLock:
    """Counts the seconds that are waited for it, and those that the parameters are lent."""

    def __init__(self, lock: Any) -> None:
        self._lock, self.waited_s = lock, 0.0
        self._since, self.lent_s = 0.0, list[float]()

    def acquire(self) -> None:
        self.waited_s += seconds(self._lock.acquire)
        self._since = time.perf_counter()

    def release(self) -> None:
        self.lent_s.append(time.perf_counter() - self._since)
        self._lock.release()

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:  # the optimizer's step
        self._lock.release()


def as_before(tensors: Any, folder: Path) -> None:
    """Inside the training loop: a copy, safetensors' own writer, a checksum of a copy of each tensor, and fsync."""
    import torch
    import xxhash
    from safetensors.torch import save_file

    held = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    save_file(held, folder / "before.safetensors", metadata={"format": "pt"})
    for tensor in held.values():
        xxhash.xxh3_64_hexdigest(tensor.flatten().view(torch.uint8).numpy().tobytes())
    with (folder / "before.safetensors").open("rb") as file:
        os.fsync(file.fileno())


# --- a worker -----------------------------------------------------------------------------------------


def copy_s(held: Any) -> float:
    """Seconds to copy all tensors into memory that is there already."""
    import torch

    into = {name: torch.zeros_like(tensor) for name, tensor in held.items()}
    return statistics.median(
        seconds(lambda: [into[name].copy_(tensor) for name, tensor in held.items()]) for _ in range(VERSIONS)
    )


async def measure_engine(config: Config, newest: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    from cusearch_async.models import load_tokenizer
    from cusearch_async.rollout.engine import Engine
    from cusearch_async.weights.folder import WeightStore
    from cusearch_async.weights.interface import TENSORS

    store = WeightStore(config.weights_folder)
    copying = copy_s(load_file(store.directory(newest) / TENSORS))
    engine = Engine.start(config.model.location, load_tokenizer(config.model.location), config)
    pauses, lags, loads = [], [], []
    swap = engine._swap

    async def timed(*arguments: Any) -> None:
        began = time.perf_counter()
        await swap(*arguments)
        pauses.append(time.perf_counter() - began)

    engine._swap = timed
    try:
        for _ in range(VERSIONS):
            began = time.perf_counter()
            loading, last, lag = asyncio.create_task(engine.load(store, newest, check=False)), began, 0.0
            while not loading.done():
                await asyncio.sleep(0.001)
                now = time.perf_counter()
                last, lag = now, max(lag, now - last - 0.001)
            await loading
            loads.append(time.perf_counter() - began)
            lags.append(1000 * lag)
    finally:
        engine.close()
    return {
        "event_loop_lag_ms": max(lags),
        "copy_s": copying,
        "pause_s": statistics.median(pauses),
        "pause_over_copy": statistics.median(pauses) / copying,
        "load_s": statistics.median(loads),
    }


async def measure_fanout(folder: Path, newest: str) -> dict[str, Any]:
    """What the learner sends when machines behind one relay open a version, in sizes of that version."""
    from cusearch_async.weights import http
    from cusearch_async.weights.relay import relaying

    learner_url, relay_url = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    learner = settings(folder, weights__transport="http", weights__url=learner_url)
    relayed = {"weights__transport": "http", "weights__url": relay_url}
    relay = settings(folder / "relay", model__path=str(learner.model.path), weights__upstream=learner_url, **relayed)
    sent, prepare = [], http._Counted.prepare

    def counted(own: Any, request: Any) -> Any:
        if own._path.is_relative_to(learner.weights_folder):
            sent.append(own._path.stat().st_size)
        return prepare(own, request)

    os.environ["CUSEARCH_WEIGHTS_TOKEN"] = "of-this-benchmark"
    http._Counted.prepare = counted  # type: ignore[method-assign]
    transport, began = http.HttpTransport(learner), time.perf_counter()
    async with transport.serving(), relaying(relay):
        for number in range(MACHINES):
            machine = settings(folder / f"machine-{number}", model__path=str(learner.model.path), **relayed)
            async with http.HttpTransport(machine).source() as source:
                await source.open(newest)
            shutil.rmtree(machine.folder)
    whole = sum(path.stat().st_size for path in transport.store().directory(newest).iterdir())
    return {f"fanout_bytes_of_{MACHINES}": sum(sent) / whole, "fanout_s": time.perf_counter() - began}


# --- sizes, kinds and ways ----------------------------------------------------------------------------


def measure_ways(folder: Path, is_smoke: bool) -> dict[str, Any]:
    from tests.bench.weight_ways import SHAPES, exact_with_gaps, ways_of

    sizes, versions = (["1 M", "55 M"], 20) if is_smoke else ([*SHAPES], GAPS)
    found: dict[str, dict[str, float]] = {}
    for size in sizes:
        found |= asyncio.run(ways_of(size, folder))
    of_largest = {kind: found[f"{sizes[-1]}, {kind}, http"]["bytes"] for kind in ("whole", "difference")}
    of_middle = {kind: found[f"55 M, {kind}, http"]["bytes"] for kind in ("whole", "adapter")}
    return {
        "ways": found,
        "delta_share_lr1e-6": of_largest["difference"] / of_largest["whole"],
        "adapter_share": of_middle["adapter"] / of_middle["whole"],
        "versions_bit_exact": asyncio.run(exact_with_gaps(folder, versions)),
    }


# --- all ---------------------------------------------------------------------------------------------


def measure(part: str, folder: Path, newest: str) -> dict[str, Any]:
    configure_process([])
    if part == "ways":
        return measure_ways(folder, newest == SMOKE)
    config = settings(folder)
    if part == "fanout":
        return asyncio.run(measure_fanout(folder, newest))
    return asyncio.run(measure_learner(config) if part == "learner" else measure_engine(config, newest))


def in_a_process(part: str, folder: Path, newest: str = "") -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.bench.bench_weights", "--part", part, str(folder), newest]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-4000:])
    return json.loads(done.stdout.splitlines()[-1])


def table_of(found: dict[str, Any]) -> Table:
    table = Table(title=f"{found['published_gb']:.2f} GB, medians of {VERSIONS} versions")
    for name in ("what", "now", "compared with"):
        table.add_column(name)
    stop, before = found["learner_stop_s_500m"], found["before_s"]
    table.add_row("learner stops for publishing", f"{stop:.3f} s", f"{before:.2f} s before")
    table.add_row("… and computes the canary", f"{found['canary_s']:.2f} s", f"update {found['update_s']:.1f} s")
    table.add_row("from the update to the announcement", f"{found['publishing_s']:.2f} s", "")
    table.add_row("a worker's event loop stands still for at most", f"{found['event_loop_lag_ms']:.0f} ms", "")
    pause, copying = found["pause_s"], found["copy_s"]
    table.add_row(
        "the engine pauses", f"{pause:.2f} s", f"copying {copying:.2f} s: {found['pause_over_copy']:.1f} times"
    )
    copies = f"{found[f'fanout_bytes_of_{MACHINES}']:.2f} versions' bytes"
    table.add_row(f"the learner sends, for {MACHINES} machines behind a relay", copies, f"{found['fanout_s']:.1f} s")
    for way, figures in found["ways"].items():
        told = f"published in {figures['publish_s']:.2f} s, opened in {figures['open_s']:.2f} s"
        table.add_row(way, told, f"{figures['bytes'] / 1e6:.2f} MB")
    table.add_row("bit for bit, of versions opened with gaps", f"{found['versions_bit_exact']}", "")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--out", type=Path, default=OUTPUT)
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        part, folder, newest = arguments.part
        print(json.dumps(measure(part, Path(folder), newest)))
        return
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name), TINY if arguments.smoke else SHAPE)
        found = in_a_process("learner", Path(name))
        found |= in_a_process("engine", Path(name), found["newest"])
        found |= in_a_process("fanout", Path(name), found["newest"])
        found |= in_a_process("ways", Path(name), SMOKE if arguments.smoke else "")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    console = Console(width=120)
    console.print(table_of(found))
    console.print(f"figures in {arguments.out}")


if __name__ == "__main__":
    main()
