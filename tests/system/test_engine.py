"""The engine against the learner's mathematics: versions, log-probabilities, weight swaps, the tied-head trap."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from cusearch_async.config import STARTER, load_config
from cusearch_async.environments import SearchEnvironment
from cusearch_async.errors import ConfigError, EngineDied, WeightsMismatch, WeightsUnavailable
from cusearch_async.lifecycle import progress
from cusearch_async.lifecycle.placement import configure_process
from cusearch_async.weights.folder import WeightStore
from cusearch_async.weights.interface import Canary
from tests.conftest import SLOW
from tests.lifecycle.test_placement import without_libnuma
from tests.system.forked import forked_engines

pytestmark = pytest.mark.system

STOPS = SearchEnvironment.stops
QUESTION = "What is the currency of the country of Pinsk?"


def logprobs_of(model: Any, token_ids: list[int], temperature: float = 1.0) -> list[float]:
    with torch.no_grad():
        log_all = torch.log_softmax(model(torch.tensor([token_ids])).logits[0].float() / temperature, -1)
    return [float(log_all[i, token]) for i, token in enumerate(token_ids[1:])]


def publish(
    store: WeightStore, model: Any, version: int, text: list[int], shift: float = 0.0, tolerance: float = 1e-3
) -> str:
    """Publish as the learner does; with `shift` the canary is wrong by as much."""
    tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    if model.config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    logprobs = [value + shift for value in logprobs_of(model, text)]
    return store.publish(version, 1, tensors, Canary(text, logprobs, tolerance))


def small_model(tied: bool, seed: int) -> Any:
    torch.manual_seed(seed)
    shape = Qwen2Config.from_pretrained(STARTER)
    shape.tie_word_embeddings = tied
    model = Qwen2ForCausalLM(shape)
    for parameter in model.parameters():
        parameter.data.mul_(3)  # far from uniform, so that wrong weights show
    return model.eval()


def with_engine(
    config_path: Path,
    folder: Path,
    model: Any,
    body: Callable[[Any, Any], Awaitable[None]],
    *overrides: str,
    forks: bool = True,
) -> None:
    """Run `body(engine, tokens of QUESTION)` on an engine that starts with `model`; a new process unless it `forks`."""
    configure_process([])
    from cusearch_async.rollout.engine import Engine

    tokenizer = AutoTokenizer.from_pretrained(STARTER)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    config = load_config(config_path, list(overrides))

    async def session() -> None:
        with forked_engines() if forks else nullcontext():
            engine = Engine.start(str(folder / "model"), tokenizer, config)
        try:
            await body(engine, tokenizer(QUESTION)["input_ids"])
        finally:
            engine.close()

    asyncio.run(session())


def engine_process() -> psutil.Process:
    alive = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    return next(p for p in alive if "EngineCore" in " ".join([p.name(), *p.cmdline()]))


def test_the_age_of_the_last_token_tells_a_hung_engine_from_a_slow_one(atlas_config, tmp_path):
    async def body(engine, text):
        process = engine_process()
        turn = asyncio.create_task(engine.generate(text, 800, 1.0, 1, STOPS))
        async with asyncio.timeout(60 * SLOW):
            while not engine._token_at:
                await asyncio.sleep(0.01)
        process.suspend()
        async with asyncio.timeout(60 * SLOW):
            while engine.last_token_age_s < 1.5:
                await asyncio.sleep(0.01)
        process.resume()
        await turn
        assert engine.last_token_age_s == 0.0
        process.kill()
        with pytest.raises(EngineDied, match=r"engine died: it printed no error \(killed, or out of memory\?\)"):
            await engine.generate(text, 800, 1.0, 1, STOPS)

    with_engine(atlas_config, tmp_path, small_model(False, 0), body)


class FakeLLM:
    """Answers every call, and keeps their names; takes staged weights when it is told to."""

    def __init__(self, dies_in: str = "", is_held: bool = False) -> None:
        self.output_processor = SimpleNamespace(process_outputs=None)
        self.dies_in, self.asked = dies_in, []
        self.swapping, self.go_on = asyncio.Event(), asyncio.Event()
        if not is_held:
            self.go_on.set()

    def __getattr__(self, method: str) -> Any:
        async def answer(*arguments: Any, **_: Any) -> list[bool]:
            name = arguments[0] if method == "collective_rpc" else method
            self.asked.append(name)
            if name == self.dies_in:
                from vllm.v1.engine.exceptions import EngineDeadError

                raise EngineDeadError
            if name == "take_staged":
                self.swapping.set()
                await self.go_on.wait()
            return [True]

        return answer


def engine_of(llm: FakeLLM, recomputes_kv: bool = True) -> Any:
    configure_process([])
    from cusearch_async.rollout.engine import Engine
    from cusearch_async.rollout.engine_output import EngineOutput

    return Engine(llm, AutoTokenizer.from_pretrained(STARTER), EngineOutput(), recomputes_kv)


def test_a_swap_that_takes_long_does_not_look_like_a_hang(tmp_path):
    store = WeightStore(tmp_path)

    async def body() -> None:
        engine = engine_of(llm := FakeLLM(is_held=True))
        name = publish(store, small_model(False, 0), 0, [1, 2, 3])
        async with engine._busy():
            loading = asyncio.create_task(engine.load(store, name, check=False))
            await asyncio.wait_for(llm.swapping.wait(), 60 * SLOW)
            await asyncio.sleep(1)
            assert engine.last_token_age_s == 0.0
            llm.go_on.set()
            await loading
            assert engine.last_token_age_s < 1, "counted from when it went on"
            await asyncio.sleep(0.05)
            assert engine.last_token_age_s > 0

    asyncio.run(body())


@pytest.mark.parametrize(
    "call", ["stage_weights", "pause_generation", "take_staged", "update_weight_version", "resume_generation"]
)
def test_an_engine_that_dies_while_it_loads_is_named(call, tmp_path):
    store = WeightStore(tmp_path)

    async def body() -> None:
        engine = engine_of(FakeLLM(dies_in=call))
        with pytest.raises(EngineDied, match="the vLLM engine died"):
            await engine.load(store, publish(store, small_model(False, 0), 0, [1, 2, 3]), check=False)

    asyncio.run(body())


def test_an_engine_is_not_started_where_its_operators_cannot_be_loaded(atlas_config, monkeypatch):
    configure_process([])
    from cusearch_async.rollout.engine import Engine

    monkeypatch.setattr("ctypes.CDLL", without_libnuma)
    with pytest.raises(ConfigError, match="needs libnuma"):
        Engine.start(STARTER, None, atlas_config)


def test_an_engine_that_hangs_is_ended_and_whoever_waits_for_it_is_told(atlas_config, tmp_path):
    """Before, its worker kept the GPU until somebody came."""

    async def body(engine, text):
        process = engine_process()
        await engine.generate(text, 8, 1.0, 1, STOPS)  # which takes long on a busy machine
        assert engine._stall_s == 3600, "the config's"
        engine._stall_s = 2.0
        turns = [asyncio.create_task(engine.generate(text, 800, 1.0, seed, STOPS)) for seed in range(3)]
        async with asyncio.timeout(60 * SLOW):
            while engine._running < 3:
                await asyncio.sleep(0.01)
        process.suspend()
        ends = await asyncio.wait_for(asyncio.gather(*turns, return_exceptions=True), 60 * SLOW)
        said = "the vLLM engine died: it had requests and produced no token for 2 s (run.stall_s), and was ended"
        assert [str(end) for end in ends] == [said] * 3
        assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE

    with_engine(atlas_config, tmp_path, small_model(False, 0), body, "--run.stall_s", "3600")


def test_an_engine_that_hangs_while_it_loads_weights_is_ended(atlas_config, tmp_path):
    """It need not produce a token then: its worker renewed its tickets for ever."""
    store, model = WeightStore(tmp_path / "store"), small_model(False, 0)

    async def body(engine, text):
        process, name = engine_process(), publish(store, model, 0, text)
        engine._stall_s = 2.0
        process.suspend()
        with pytest.raises(
            EngineDied, match=rf"died: it did not load {name} within 2 s \(run\.stall_s\), and was ended"
        ):
            await asyncio.wait_for(engine.load(store, name, check=True), 60 * SLOW)
        assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE

    with_engine(atlas_config, tmp_path, model, body)


def test_an_engine_that_fails_is_quoted(atlas_config, tmp_path):
    """vLLM's CPU attention knows no heads of 16 numbers, and finds out at the first request."""
    shape = Qwen2Config.from_pretrained(STARTER)
    shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads, shape.intermediate_size = 64, 4, 4, 128

    async def body(engine, text):
        await engine.generate(text, 8, 1.0, 1, STOPS)

    with pytest.raises(EngineDied, match=r"the vLLM engine died: RuntimeError: .*head_dim=16"):
        with_engine(atlas_config, tmp_path, Qwen2ForCausalLM(shape), body, forks=False)


def test_wrong_or_torn_weights_never_go_unnoticed(atlas_config, tmp_path):
    store = WeightStore(tmp_path / "store")
    model = small_model(False, 0)

    async def body(engine, text):
        with pytest.raises(WeightsUnavailable):
            await engine.load(store, "v000007-e1", check=True)
        assert engine.version == -1
        await engine.load(store, publish(store, model, 0, text), check=True)
        gone = publish(store, model, 3, text)
        ask = engine._llm.collective_rpc

        async def lose_and_ask(*method, **options):
            shutil.rmtree(store.folder / gone, ignore_errors=True)
            return await ask(*method, **options)

        engine._llm.collective_rpc = lose_and_ask
        with pytest.raises(WeightsUnavailable, match="v000003-e1 was removed before it was loaded"):
            await engine.load(store, gone, check=True)
        engine._llm.collective_rpc = ask
        assert (engine.version, engine.last_token_age_s) == (0, 0.0)
        seeded = [(await engine.generate(text, 30, 1.0, 5, STOPS)).token_ids for _ in range(2)]
        assert seeded[0] == seeded[1]
        with pytest.raises(WeightsMismatch, match="differ from the learner's by"):
            await engine.load(store, publish(store, model, 1, text, shift=0.01), check=True)

    with_engine(atlas_config, tmp_path, model, body)


def test_an_engine_that_keeps_old_weights_is_found_at_the_first_check(atlas_config, tmp_path):
    """In bfloat16 at a learning rate of 1e-6 a step changes about one weight in a hundred, by its last bit; the canary
    cannot see that."""
    store = WeightStore(tmp_path / "store")
    torch.manual_seed(0)
    model = small_model(False, 0).to(torch.bfloat16)

    def step() -> None:
        for parameter in model.parameters():
            bits = parameter.data.view(torch.int16)
            bits += (torch.rand(bits.shape) < 0.01).to(torch.int16)

    async def body(engine, text):
        for version in range(3):
            await engine.load(store, publish(store, model, version, text, tolerance=0.1), check=True)
            step()

        async def keep(*_):
            pass

        engine._swap = keep
        with pytest.raises(WeightsMismatch, match="tensors are still of an older version, such as "):
            await engine.load(store, publish(store, model, 3, text, tolerance=0.1), check=True)

    with_engine(atlas_config, tmp_path, model, body, "--model.dtype", "bfloat16")


def wide_model() -> Any:
    """A model whose weights take about 60 MB."""
    shape = Qwen2Config.from_pretrained(STARTER)
    shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads = 512, 8, 2
    shape.intermediate_size, shape.tie_word_embeddings = 2048, True
    torch.manual_seed(0)
    return Qwen2ForCausalLM(shape).eval()


def test_what_is_staged_is_not_computed_with_before_the_engine_takes_it_over(atlas_config, tmp_path):
    store = WeightStore(tmp_path / "store")
    old, new = small_model(True, 0), small_model(True, 1)

    async def body(engine, text):
        await engine.load(store, publish(store, old, 0, text), check=True)
        newer = await store.open(publish(store, new, 1, text))
        for _ in range(2):
            await engine._stage(newer)
            np.testing.assert_allclose(await engine.score([*text, 5]), logprobs_of(old, [*text, 5]), atol=1e-3)
        await engine.load(store, newer.name, check=True)
        np.testing.assert_allclose(await engine.score([*text, 6]), logprobs_of(new, [*text, 6]), atol=1e-3)

    with_engine(atlas_config, tmp_path, old, body)


def test_weights_that_cannot_be_staged_leave_the_engine_with_those_it_has(atlas_config, tmp_path):
    store = WeightStore(tmp_path / "store")
    model = small_model(True, 0)

    async def body(engine, text):
        await engine.load(store, publish(store, model, 0, text), check=True)
        other = publish(store, wide_model(), 1, text)
        with pytest.raises(WeightsMismatch, match=r"v000001-e1/model.safetensors cannot be loaded: .*of this model\?"):
            await engine.load(store, other, check=True)
        with pytest.raises(WeightsUnavailable, match="v000009-e1 was removed before it was loaded"):
            await engine._stage(replace(await store.open(other), directory=store.folder / "v000009-e1"))
        assert engine.version == 0
        np.testing.assert_allclose(await engine.score([*text, 5]), logprobs_of(model, [*text, 5]), atol=1e-3)

    with_engine(atlas_config, tmp_path, model, body)


@pytest.mark.slow
def test_experts_are_read_before_the_pause_and_packed_in_it(atlas_config, tmp_path):
    """They are packed too, and are no linear layers: such a model has no shadow."""
    store = WeightStore(tmp_path / "store")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 384}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
    torch.manual_seed(0)
    shape = Qwen3MoeConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=2, **heads, **experts)
    old, new = Qwen3MoeForCausalLM(shape).eval(), Qwen3MoeForCausalLM(shape).eval()

    async def body(engine, text):
        newer = await store.open(publish(store, new, 1, text))
        await engine._stage(newer)
        np.testing.assert_allclose(await engine.score(text), logprobs_of(old, text), atol=1e-3)
        await engine.load(store, newer.name, check=True)
        np.testing.assert_allclose(await engine.score([*text, 6]), logprobs_of(new, [*text, 6]), atol=1e-3)

    with_engine(atlas_config, tmp_path, old, body)


@pytest.mark.slow
def test_an_engine_does_not_grow_with_the_versions_it_loads(atlas_config, tmp_path):
    store, model = WeightStore(tmp_path / "store"), wide_model()
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert size > 40 << 20

    async def body(engine, text):
        process = engine_process()
        taken = []
        for version in range(9):
            await engine.load(store, publish(store, model, version, [1, 2, 3]), check=False)
            taken.append(process.memory_info().rss)
        assert taken[-1] - taken[2] < 2 * size, [rss >> 20 for rss in taken]

    with_engine(atlas_config, tmp_path, model, body)


def test_without_recomputing_turns_in_flight_keep_their_cache_and_new_ones_never_use_it(atlas_config, tmp_path):
    store = WeightStore(tmp_path / "store")
    old, new = small_model(False, 0), small_model(False, 1)

    async def body(engine, text):
        text = text * 6
        await engine.load(store, publish(store, old, 0, text), check=True)
        newer = publish(store, new, 1, text)
        turns = [asyncio.create_task(engine.generate([*text, i], 80, 1.0, i, STOPS)) for i in range(16)]
        await asyncio.wait(turns, return_when=asyncio.FIRST_COMPLETED)
        await engine.load(store, newer, check=True)
        apart = []
        for number, turn in enumerate([await turn for turn in turns]):
            own = turn.versions == 1
            if own.any() and not own.all():
                expected = np.array(logprobs_of(new, [*text, number, *turn.token_ids]))[len(text) :]
                apart.append(float(np.abs(turn.logprobs[own] - expected[own]).max()))
        assert max(apart) > 0.1, "the keys and values of the old weights are still used"
        turn = await engine.generate([*text, 0], 30, 1.0, 7, STOPS)
        expected = np.array(logprobs_of(new, [*text, 0, *turn.token_ids]))[len(text) :]
        np.testing.assert_allclose(turn.logprobs, expected, atol=1e-3)

    with_engine(atlas_config, tmp_path, old, body, "--rollout.recompute_kv", "false")


def test_a_version_is_verified_in_a_thread_and_read_before_the_engine_is_paused(atlas_config, tmp_path):
    """Hashing 15 GB takes ten seconds, in which the leases of the worker's tickets must be renewed."""
    store, llm, verified_in = WeightStore(tmp_path / "store"), FakeLLM(), []
    engine = engine_of(llm)
    name = publish(store, small_model(True, 0), 0, [1, 2, 3])
    verify = store.verify

    def verify_slowly(name: str) -> Any:
        assert llm.asked == [], "episodes go on meanwhile"
        verified_in.append(threading.current_thread())
        time.sleep(0.2)
        return verify(name)

    store.verify = verify_slowly

    async def session() -> int:
        loading, beats = asyncio.create_task(engine.load(store, name, check=False)), 0
        while not loading.done():
            await asyncio.sleep(0.01)
            beats += 1
        await loading
        return beats

    assert asyncio.run(session()) > 5
    assert verified_in != [threading.main_thread()]
    read, swapped = ["stage_weights", "is_staged"], ["take_staged", "update_weight_version"]
    assert llm.asked == [*read, "pause_generation", *swapped, "resume_generation"]
    assert engine.loaded == name


def test_an_engine_that_takes_long_to_start_says_so(atlas_config, monkeypatch, caplog):
    configure_process([])
    from cusearch_async.rollout import engine as engines

    def start_slowly(_: Any) -> None:
        time.sleep(0.2)
        raise RuntimeError("that was all")

    monkeypatch.setattr(progress, "LOG_EVERY_S", 0.05)
    monkeypatch.setattr(engines.AsyncLLM, "from_engine_args", start_slowly)
    caplog.set_level("INFO")
    with pytest.raises(EngineDied, match="that was all"):
        engines.Engine.start(str(STARTER), AutoTokenizer.from_pretrained(STARTER), load_config(atlas_config))
    assert f"waiting for vLLM to load {STARTER}: 0 s" in caplog.messages
