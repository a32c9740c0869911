"""Seconds and bytes of a version, by its size, what is sent of it, and the way; and versions that are opened with gaps,
compared bit for bit. A part of `bench_weights`."""

from __future__ import annotations

import asyncio
import shutil
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from cusearch_async.config import Config, LoraConfig, load_config
from cusearch_async.learner.adapter import Adapter
from cusearch_async.learner.model import tied_names
from cusearch_async.run import folder as run_folder
from cusearch_async.weights.interface import TENSORS, Canary
from cusearch_async.weights.objects import open_objects
from cusearch_async.weights.transports import transport_of
from tests.bench.bench_weights import ATLAS, SHAPE
from tests.conftest import free_port

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True}
SHAPES = {
    "1 M": HEADS | {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 2000},
    "55 M": HEADS | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 10, "vocab_size": 32_000},
    "500 M": SHAPE,
}
WAYS = ("folder", "http", "object")
TIMES = 3
"""Openings, of which the median counts."""
CANARY = Canary([1], [], 0)

Tensors = Mapping[str, torch.Tensor]


def config_of(folder: Path, way: str) -> Config:
    for place in ("objects", way):
        (folder / place).mkdir(parents=True, exist_ok=True)
    given = {
        "run.folder": folder / way,
        "weights.transport": way,
        **({"weights.url": f"http://127.0.0.1:{free_port()}"} if way == "http" else {}),
        **({"weights.objects": "s3://bench/run"} if way == "object" else {}),
    }
    config = load_config(ATLAS, [word for key, value in given.items() for word in (f"--{key}", str(value))])
    run_folder.mark(config.folder, config.run.name)  # as a learner does before it serves
    return config


def after_a_step(weights: Tensors, noise: torch.Generator, lr: float = 1e-6) -> dict[str, torch.Tensor]:
    """The weights after one step of Adam, which changes each by the learning rate: of float32 weights somewhere in the
    interval that bfloat16 rounds to those before."""
    found = {}
    for name, before in weights.items():
        within = torch.randint(-(2**15) + 1, 2**15, before.shape, generator=noise, dtype=torch.int32)
        exact = before.float()  # whose lower 16 bits bfloat16 lacks
        master = torch.where(before == 0, exact, (exact.view(torch.int32) + within).view(torch.float32))
        found[name] = (master + lr * torch.randn(before.shape, generator=noise).sign()).to(before.dtype)
    return found


async def ways_of(size: str, folder: Path) -> dict[str, dict[str, float]]:
    """`SIZE, KIND, WAY` -> seconds to publish, seconds to open on another machine, and bytes that it was sent."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPES[size])).to(torch.bfloat16)
    base = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    step = after_a_step(base, torch.Generator().manual_seed(0))
    for tensors in (base, step):  # as the learner publishes them
        tensors |= {other: tensors[name] for other, name in tied_names(model).items()}
    adapter = Adapter.into(model, LoraConfig(rank=8), "random", 0)
    trained = adapter.by_peft_names({name: parameter.detach() for name, parameter in model.named_parameters()})
    found = {}
    for way in WAYS:
        config = config_of(folder / size.replace(" ", "-"), way)
        case = Case(config)
        async with case.transport.serving():
            kinds = {"whole": await case.timed(base), "adapter": await case.timed(trained, adapter.config)}
            if way == "http":
                kinds["difference"] = await case.timed(step, base=base)
        found |= {f"{size}, {kind}, {way}": figures for kind, figures in kinds.items()}
        shutil.rmtree(config.folder)
    return found


class Case:
    """One way. `timed` publishes and opens a version on a machine that has the version before, if that is given."""

    def __init__(self, config: Config) -> None:
        self.transport: Any = transport_of(config)
        if config.weights.transport == "object":  # a folder, through the client of the object store
            self.transport._objects = open_objects(f"file://{config.folder.with_name('objects')}")
        self._store = self.transport.store()
        self._copies = config.weights_folder.with_name("downloaded")
        self._version = 0

    async def timed(self, tensors: Tensors, adapter: Any = None, base: Tensors | None = None) -> dict[str, float]:
        opened_s, before = [], self._publish(base) if base else ""
        began = time.perf_counter()
        name = self._publish(tensors, adapter)
        publish_s = time.perf_counter() - began
        for _ in range(TIMES):
            shutil.rmtree(self._copies, ignore_errors=True)
            async with self.transport.source() as source:
                if before:
                    await source.open(before)
                began = time.perf_counter()
                await source.open(name)
                opened_s.append(time.perf_counter() - began)
        directory = self._store.directory(name)
        differences = list(directory.glob("*.from-*"))
        assert len(differences) == bool(before)
        sent = sum(path.stat().st_size for path in differences or directory.iterdir())
        return {"publish_s": publish_s, "open_s": statistics.median(opened_s), "bytes": sent}

    def _publish(self, tensors: Tensors, adapter: Any = None) -> str:
        self._version += 1
        return self._store.publish(self._version, 1, tensors, CANARY, adapter=adapter)


async def exact_with_gaps(folder: Path, versions: int, seed: int = 0) -> int:
    """How many of so many versions were bit for bit those published, when a machine opens every fifth to every one by
    chance; the differences are made of bases that may be gone."""
    gaps, noise = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    tensors = {f"layers.{n}": torch.randn(125, 1000, generator=noise).to(torch.bfloat16) / 30 for n in range(8)}
    transport, exact, version = transport_of(config_of(folder / "gaps", "http")), 0, 0
    store = transport.store()
    async with transport.serving(), transport.source() as source:
        for _ in range(versions):
            for _ in range(int(gaps.integers(1, 6))):
                version, tensors = version + 1, after_a_step(tensors, noise)
                name = await asyncio.to_thread(store.publish, version, 1, tensors, CANARY)
            opened = load_file((await source.open(name)).directory / TENSORS)
            exact += all(
                torch.equal(opened[key].view(torch.int16), tensor.view(torch.int16)) for key, tensor in tensors.items()
            )
    return exact
