"""Weights on their way into real engines: out of a folder, and downloaded from the learner without one."""

from __future__ import annotations

import asyncio
import shutil
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file

from cusearch_async.config import load_config, shipped_configs
from cusearch_async.errors import WeightsMismatch, WeightsUnavailable
from cusearch_async.metrics.files import read_metrics
from cusearch_async.weights import downloads as client
from cusearch_async.weights.downloads import Downloads
from cusearch_async.weights.folder import WeightStore
from cusearch_async.weights.http import HttpTransport
from cusearch_async.weights.objects import open_objects, versions_in
from tests.conftest import SLOW, free_port, wait_until
from tests.object_stores import SERVER, s3, s3_environment  # noqa: F401  (a fixture)
from tests.system.conftest import Run, finish
from tests.system.test_engine import STOPS, logprobs_of, publish, small_model, wide_model, with_engine

pytestmark = pytest.mark.system

IN_THE_HOSTS_MEMORY = "tests.system.host_staging.StagesInTheHostsMemory"


async def exchange_in_flight(engine: Any, text: list[int], source: Any, store: WeightStore, models: list[Any]) -> None:
    """Load both `models` from `source`, the second while 64 turns run. Tokens know their version, and have the
    log-probabilities that it gives them after the tokens before."""
    old, new = models
    await engine.load(source, publish(store, old, 0, text), check=True)
    newer = publish(store, new, 1, text)
    turns = [asyncio.create_task(engine.generate([*text, i], 80, 1.0, i, STOPS)) for i in range(16)]
    await asyncio.wait(turns, return_when=asyncio.FIRST_COMPLETED)
    await engine.load(source, newer, check=True)
    assert (engine.version, engine.loaded) == (1, newer)
    spans = set()
    for number, turn in enumerate([await turn for turn in turns]):
        assert len(turn.token_ids) == len(turn.logprobs) == len(turn.versions)
        assert list(turn.versions) == sorted(turn.versions)
        spans |= set(turn.versions.tolist())
        ids = [*text, number, *turn.token_ids]
        for version, model in enumerate(models):
            own = turn.versions == version
            expected = np.array(logprobs_of(model, ids))[len(text) :]
            np.testing.assert_allclose(turn.logprobs[own], expected[own], atol=1e-3)
    assert spans == {0, 1}, "some turns saw both versions"


@asynccontextmanager
async def served(folder: Path, store: WeightStore) -> AsyncIterator[Downloads]:
    """What is in the store, downloaded into another folder."""
    options = ("--weights.transport", "http", "--weights.url", f"http://127.0.0.1:{free_port()}")
    transport = HttpTransport(load_config(shipped_configs()["atlas"], ["--run.folder", str(folder), *options]))
    transport._store = store
    await asyncio.to_thread(folder.mkdir, exist_ok=True)
    async with transport.serving(), transport.source() as downloads:
        yield downloads


@pytest.mark.parametrize(
    ("tied", "downloaded"),
    [
        (True, True),
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
def test_weights_are_exchanged_while_turns_are_in_flight(tied, downloaded, atlas_config, tmp_path):
    store, models = WeightStore(tmp_path / "store"), [small_model(tied, seed) for seed in (0, 1)]

    async def body(engine, text):
        async with served(tmp_path / "host", store) if downloaded else nullcontext(store) as source:
            await exchange_in_flight(engine, text, source, store, models)

    with_engine(atlas_config, tmp_path, models[0], body)


def test_a_learner_that_dies_during_a_download_changes_nothing_and_its_successor_is_found(
    atlas_config, tmp_path, monkeypatch
):
    store = WeightStore(tmp_path / "store")
    old, new = small_model(True, 0), small_model(True, 1)
    keep = client.keep

    async def body(engine, text):
        async with served(tmp_path / "host", store) as downloads:
            await engine.load(downloads, publish(store, old, 0, text), check=True)
            newer = publish(store, new, 1, text)

            def dies(piece, file, tensors):
                raise ConnectionResetError("the learner was killed")

            monkeypatch.setattr(client, "keep", dies)
            with pytest.raises(WeightsUnavailable, match=r"does not answer at weights.url"):
                await engine.load(downloads, newer, check=True)
            monkeypatch.setattr(client, "keep", keep)
        assert engine.version == 0
        np.testing.assert_allclose(await engine.score([*text, 5]), logprobs_of(old, [*text, 5]), atol=1e-3)
        async with served(tmp_path / "host", store) as downloads:
            await engine.load(downloads, newer, check=True)
        np.testing.assert_allclose(await engine.score([*text, 6]), logprobs_of(new, [*text, 6]), atol=1e-3)

    with_engine(atlas_config, tmp_path, old, body)


@pytest.mark.parametrize("in_the_hosts_memory", [False, True])
def test_a_version_is_in_the_engines_process_before_the_pause(in_the_hosts_memory, atlas_config, tmp_path, monkeypatch):
    """Its files may be gone by then. With `in_the_hosts_memory` as on a GPU, which has no room for a second model."""
    store, old, new = WeightStore(tmp_path / "store"), small_model(True, 0), small_model(True, 1)
    if in_the_hosts_memory:
        monkeypatch.setattr("cusearch_async.rollout.engine.STAGING", IN_THE_HOSTS_MEMORY)

    async def body(engine, text):
        await engine.load(store, publish(store, old, 0, text), check=True)
        newer = publish(store, new, 1, text)
        stage = engine._stage

        async def staged_and_deleted(version):
            await stage(version)
            shutil.rmtree(version.directory)

        monkeypatch.setattr(engine, "_stage", staged_and_deleted)
        await engine.load(store, newer, check=True)
        np.testing.assert_allclose(await engine.score([*text, 6]), logprobs_of(new, [*text, 6]), atol=1e-3)

    with_engine(atlas_config, tmp_path, old, body)


@pytest.mark.parametrize("in_the_hosts_memory", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_weights_of_another_model_end_the_worker(in_the_hosts_memory, atlas_config, tmp_path, monkeypatch):
    store, model = WeightStore(tmp_path / "store"), small_model(True, 0)
    if in_the_hosts_memory:
        monkeypatch.setattr("cusearch_async.rollout.engine.STAGING", IN_THE_HOSTS_MEMORY)

    async def body(engine, text):
        async with served(tmp_path / "host", store) as downloads:
            with pytest.raises(WeightsMismatch, match=r"v000001-e1\S* (cannot be loaded|failed halfway)"):
                await engine.load(downloads, publish(store, wide_model(), 1, text), check=True)

    with_engine(atlas_config, tmp_path, model, body)


def test_a_file_is_read_into_one_block_of_the_hosts_memory(tmp_path):
    """Page-locked, a block for each tensor took up to twice the file: each is rounded up to a power of two."""
    from cusearch_async.rollout.staging import read_tensors

    kinds = {"bf16": torch.bfloat16, "f32": torch.float32, "bool": torch.bool, "u8": torch.uint8}
    written = {
        f"{name}{size}": torch.randn(size, 3).to(kind) for name, kind in kinds.items() for size in (0, 1, 7, 999)
    }
    written["scalar"] = torch.tensor(2.5)
    save_file(written, tmp_path / "model.safetensors")
    read = read_tensors(str(tmp_path / "model.safetensors"), torch.device("cpu"))
    assert read.keys() == written.keys()
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in written.items())
    assert len({tensor.untyped_storage().data_ptr() for tensor in read.values()}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 8])
def test_a_run_whose_processes_share_no_folder(rank, run: Run, tmp_path: Path, monkeypatch):
    """The learner is killed in the middle, and started again; worker, relay and evaluator stay, each with a run folder
    of its own, and the last version is scored after the learner's end. The evaluator is behind the relay."""
    run.overrides |= {"weights.transport": "http", "weights.url": f"http://127.0.0.1:{free_port()}"}
    run.overrides |= {"pool.max_staleness": 0, "learner.lora.rank": rank, "eval.every": 3, "eval.limit": 20}
    monkeypatch.setenv("CUSEARCH_REDIS_PASSWORD", "of-this-test")
    monkeypatch.setenv("CUSEARCH_WEIGHTS_TOKEN", "also-of-this-test")
    run.cusearch("redis")
    run.worker("retriever")
    elsewhere, further = tmp_path / "elsewhere", tmp_path / "further"
    rollout = run.worker("rollout", run__folder=elsewhere)
    relayed = {"weights.url": f"http://127.0.0.1:{free_port()}"}
    run.worker("relay", **relayed, weights__upstream=run.overrides["weights.url"], run__folder=tmp_path / "relay")
    evaluator = run.worker("evaluator", **relayed, run__folder=further, run__steps=6)
    learner = run.worker("learner", run__steps=6)
    wait_until(lambda: len(run.metrics()) >= 2 or rollout.poll() is not None or learner.poll() is not None, 150)
    assert (rollout.poll(), learner.poll()) == (None, None)
    psutil.Process(learner.pid).kill()
    learner.wait(60 * SLOW)
    wait_until(lambda: "ready" in Path(evaluator.log).read_text() or evaluator.poll() is not None, 150)
    status, output = finish(run.worker("learner", run__steps=6))
    assert status == 0, output
    assert "serving weights at http://127.0.0.1" in output
    assert [row["step"] for row in run.metrics()] == [0, 1, 2, 3, 4, 5]
    assert {row["staleness/max"] for row in run.metrics()} == {0}, "every version was loaded"
    for process in (rollout, evaluator):
        status, output = finish(process, 120)
        assert status == 0, output
    assert "version 6: EM" in output
    assert not list((elsewhere / "weights").glob("*"))
    assert list((tmp_path / "relay" / "relayed").glob("v*")), "the evaluator's"


@pytest.mark.slow
@pytest.mark.skipif(not SERVER.exists(), reason=f"{SERVER}: make setup-sdks")
def test_a_run_through_an_object_store(run: Run, s3: str, tmp_path: Path, monkeypatch):  # noqa: F811
    """The learner is killed in the middle, and started on another machine; the worker has a run folder of its own."""
    for name, value in s3_environment(s3).items():
        monkeypatch.setenv(name, value)
    urllib.request.urlopen(urllib.request.Request(f"{s3}/weights", method="PUT")).close()
    run.overrides |= {"weights.transport": "object", "weights.objects": "s3://weights/of/it", "pool.max_staleness": 0}
    run.overrides |= {"learner.checkpoint_objects": "s3://weights/of/it", "learner.checkpoint_every": 1}
    monkeypatch.setenv("CUSEARCH_REDIS_PASSWORD", "of-this-test")
    run.cusearch("redis")
    run.worker("retriever")
    rollout = run.worker("rollout", run__folder=tmp_path / "elsewhere")
    learner = run.worker("learner", run__steps=4)
    wait_until(lambda: len(run.metrics()) >= 2 or rollout.poll() is not None or learner.poll() is not None, 150)
    assert (rollout.poll(), learner.poll()) == (None, None)
    psutil.Process(learner.pid).kill()
    learner.wait(60 * SLOW)
    moved = tmp_path / "moved"
    status, output = finish(run.worker("learner", run__steps=4, run__folder=moved))
    assert status == 0, output
    assert "resuming from step" in output
    rows = read_metrics(moved / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3], "the curves have moved, too"
    assert {row["staleness/max"] for row in rows} == {0}, "every version was loaded"
    status, output = finish(rollout, 120)
    assert status == 0, output
    assert list((tmp_path / "elsewhere" / "downloaded").glob("v*"))
    assert len(versions_in(open_objects("s3://weights/of/it"))) == 3
