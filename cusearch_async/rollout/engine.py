"""The adapter to vLLM: token ids in, token ids out. No other module of this process imports vLLM.

Every sampled token has its log-probability under the sampling policy (after temperature) and the weight version that
sampled it. Weights are read and verified while episodes continue (staging.py), and replaced in a pause between two
decoding steps: running requests keep their tokens, and their KV cache is recomputed unless rollout.recompute_kv is
off.
"""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import gc
import itertools
import logging
import math
import multiprocessing
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any

import numpy as np
import vllm
from numpy.typing import NDArray
from pydantic import ValidationError
from vllm import AsyncEngineArgs, SamplingParams
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from cusearch_async.config import Config, refuse_unknown
from cusearch_async.errors import ConfigError, EngineDied, WeightsMismatch, WeightsUnavailable, first_line
from cusearch_async.lifecycle.gpu_share import GpuLock, GpuShare
from cusearch_async.lifecycle.placement import require_libnuma
from cusearch_async.lifecycle.progress import log_waiting
from cusearch_async.rollout.engine_output import EngineOutput
from cusearch_async.rollout.staleness_check import Loaded, digests_of, stale_tensors
from cusearch_async.rollout.turn import Turn, turn_of
from cusearch_async.weights.interface import Manifest, OpenedVersion, WeightSource

log = logging.getLogger(__name__)

CPU_BATCH_TOKENS = 4096
"""Maximum number of tokens of one engine step on CPU; prompts that do not fit wait for the next step."""

STAGING = "cusearch_async.rollout.staging.StagesWeights"
GATHERING = "cusearch_async.rollout.turn_scheduler.GathersOutputs"
STAGED_POLL_S = 0.01
LOOK_S = 1.0

ADAPTER = "policy", 1
"""Name and number of the only adapter, the same for all versions: requests in flight continue with the newest."""
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's max_lora_rank."""


class Engine:
    def __init__(
        self,
        llm: AsyncLLM,
        tokenizer: Any,
        engine_output: EngineOutput,
        recomputes_kv: bool = True,
        lock: GpuLock | None = None,
        stall_s: float = math.inf,
    ) -> None:
        self._llm = llm
        self._stall_s = stall_s
        self._watching: asyncio.Task[None] | None = None
        self._hung = ""
        """Why the engine was ended."""
        self._recomputes_kv = recomputes_kv
        self._engine_output = engine_output
        self._tokenizer = tokenizer
        self._stop_settings: dict[tuple[str, ...], dict[str, Any]] = {}
        """Texts that end a turn -> settings for vLLM."""
        self._ids = itertools.count()
        self.version = -1
        """Version of the loaded weights, in learner steps; -1 before any published weights are loaded."""
        self.loaded = ""
        """Directory of the loaded weights in the weight store."""
        self._adapter: LoRARequest | None = None
        """The loaded adapter; None for the model alone."""
        self.sampled_tokens = 0
        self.request_s = 0.0
        """Seconds of all requests that are over, together."""
        self._running = 0
        self._busy_s = 0.0
        self._busy_since = 0.0
        self._token_at = 0.0
        """Time of the engine's last token for any request, or of its last resume."""
        self._listen(llm)
        self._is_silent = False
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._checked: Loaded | None = None
        """The engine at the last check of its weights."""
        self._gpus = GpuShare(lock, self._wake_up, self._sleep)

    @classmethod
    def start(cls, model: str, tokenizer: Any, config: Config, lock: GpuLock | None = None) -> Engine:
        """Load `model` (a local folder or a Hub id) into a new engine. Takes seconds to minutes. With a `lock`, which
        is taken, the engine sleeps and releases the GPUs whenever nobody needs it `active`.

        Raises: ConfigError for an option that vLLM does not know, or as `require_libnuma`; EngineDied with the engine's
        last error."""
        on_cpu = current_platform.is_cpu()
        if on_cpu:
            require_libnuma()
        arguments = AsyncEngineArgs(**engine_arguments(model, config, on_cpu))
        engine_output = EngineOutput()
        try:
            with log_waiting(log, f"waiting for vLLM to load {model}"), engine_output.listening():
                llm = AsyncLLM.from_engine_args(arguments)
        except (RuntimeError, ValueError, OSError) as error:
            of_settings = error.errors()[0]["msg"] if isinstance(error, ValidationError) else ""
            why = engine_output.last_error() or of_settings or first_line(error)
            raise EngineDied(f"vLLM cannot start with {model!r}: {why}") from error
        return cls(llm, tokenizer, engine_output, config.rollout.recompute_kv, lock, config.run.stall_s)

    def _listen(self, llm: AsyncLLM) -> None:
        """Record the time of every step of the engine. vLLM itself reports only the last token of a request."""
        process = llm.output_processor.process_outputs

        def processed(*args: Any, **options: Any) -> Any:
            self._token_at = time.monotonic()
            return process(*args, **options)

        llm.output_processor.process_outputs = processed

    @property
    def busy_s(self) -> float:
        """Seconds so far in which at least one request was being decoded."""
        return self._busy_s + (time.monotonic() - self._busy_since if self._running else 0.0)

    @property
    def last_token_age_s(self) -> float:
        """Seconds since the engine produced a token, or since its first request; 0 without requests, or while it is
        paused to load weights, or sums them."""
        if self._is_silent or not self._running:
            return 0.0
        return time.monotonic() - max(self._token_at, self._busy_since)

    async def _end_when_it_hangs(self) -> None:
        """End an engine that has requests and produces no token for run.stall_s: it never comes back, and whoever waits
        for it gets EngineDied. Only time in which this process runs counts."""
        silent_s = 0.0
        while silent_s < self._stall_s:
            await asyncio.sleep(LOOK_S)
            silent_s = silent_s + LOOK_S if self.last_token_age_s >= LOOK_S else 0.0
        self._end(f"it had requests and produced no token for {self._stall_s:g} s (run.stall_s), and was ended")

    def _end(self, why: str) -> None:
        self._hung = why
        for process in multiprocessing.active_children():
            if process.name.startswith("EngineCore"):
                process.kill()

    def active(self) -> AbstractAsyncContextManager[None]:
        """Around every use of the engine: it does not sleep inside. Raises: Stalled when the learner keeps the GPUs."""
        return self._gpus.active()

    async def _sleep(self) -> None:
        """Move the weights to the host's memory, and drop the KV cache. Raises: EngineDied."""
        await self._changed(self._llm.sleep(level=1), "fall asleep")

    async def _wake_up(self) -> None:
        await self._changed(self._llm.wake_up(), "wake up")

    async def _changed(self, call: Awaitable[Any], what: str) -> None:
        try:
            await self._unless_dead(call)
        except EngineDied:
            raise
        except Exception as error:  # vLLM gives what went wrong in its process without a type
            raise EngineDied(f"the vLLM engine cannot {what}: {first_line(error)}") from error

    async def _unless_dead(self, call: Awaitable[Any]) -> None:
        try:
            await call
        except EngineDeadError as error:
            raise await self._died(error) from error

    async def generate(
        self, prompt: Sequence[int], max_tokens: int, temperature: float, seed: int | None, stops: Sequence[str]
    ) -> Turn:
        """Sample one turn after `prompt`, up to and with the first of `stops`. `temperature` 0 is greedy."""
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
            **self._stopping_at(tuple(stops)),
        )
        async with self._busy():
            output = await self._run(prompt, params)
        turn = turn_of(output.outputs[0], self.version)
        self.sampled_tokens += len(turn.token_ids)
        return turn.up_to(tokens_to_first(stops, turn.token_ids, self._tokenizer))

    def _stopping_at(self, stops: tuple[str, ...]) -> dict[str, Any]:
        """vLLM's settings to end a turn: stop tokens if all of `stops` are added tokens, else stop texts, also in
        special tokens. Other single tokens are a part of longer ones, too."""
        if stops not in self._stop_settings:
            added = set(self._tokenizer.get_added_vocab().values())
            pieces = [self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in stops]
            self._stop_settings[stops] = (
                {"stop_token_ids": [piece[0] for piece in pieces], "detokenize": False}
                if all(len(piece) == 1 and piece[0] in added for piece in pieces)
                else {
                    "stop": list(stops),
                    "include_stop_str_in_output": True,
                    "skip_special_tokens": False,
                    "spaces_between_special_tokens": False,
                }
            )
        return self._stop_settings[stops]

    async def load(self, source: WeightSource, name: str, check: bool) -> None:
        """Load the weights `name`; requests in flight continue with them.

        The version is verified before the engine is paused, so episodes continue during that. With `check`, the
        engine's log-probabilities are then compared with the learner's.
        Raises: WeightsUnavailable (nothing has changed); WeightsMismatch (the engine must not be used any more);
        EngineDied."""
        version = await source.open(name)
        async with self.active(), self._ending_if_it_hangs(name):
            await self._unless_dead(self._take(version))
            if check:
                await self._unless_dead(self.check(version.manifest, name))

    async def _take(self, version: OpenedVersion) -> None:
        is_adapter = version.manifest.adapter is not None  # which vLLM reads in the pause
        if not is_adapter:
            await self._stage(version)
        async with self._paused():
            is_gone = is_adapter and not (version.directory / version.manifest.file).exists()
            if not is_gone:
                await self._swap(version)
                self.version, self.loaded = version.manifest.version, version.name
        if is_gone:
            raise WeightsUnavailable(f"{version.directory} was removed before it was loaded")

    @asynccontextmanager
    async def _ending_if_it_hangs(self, name: str) -> AsyncIterator[None]:
        """Around the loading of weights, in which an engine need not produce a token."""
        patience_s = self._stall_s if math.isfinite(self._stall_s) else None
        try:
            async with asyncio.timeout(patience_s):
                yield
        except TimeoutError as error:
            self._end(f"it did not load {name} within {self._stall_s:g} s (run.stall_s), and was ended")
            raise await self._died(error) from error

    async def _stage(self, version: OpenedVersion) -> None:
        """The weights are in the engine's process, and the model has not changed."""
        file = version.directory / version.manifest.file
        try:
            await self._llm.collective_rpc("stage_weights", kwargs={"file": str(file)})
            while not all(answers := await self._llm.collective_rpc("is_staged")):
                await asyncio.sleep(STAGED_POLL_S)
            if failed := [answer for answer in answers if isinstance(answer, str)]:
                raise RuntimeError(failed[0])
        except EngineDeadError:
            raise
        except Exception as error:
            if not await asyncio.to_thread(file.exists):
                self._engine_output.forget()
                raise WeightsUnavailable(f"{file.parent} was removed before it was loaded") from error
            raise WeightsMismatch(f"{file} cannot be loaded: {error}; are these the weights of this model?") from error

    async def _swap(self, version: OpenedVersion) -> None:
        directory, manifest = version.directory, version.manifest
        try:
            if manifest.adapter is None:
                await self._llm.collective_rpc("take_staged")
            else:
                if not await self._llm.add_lora(LoRARequest(*ADAPTER, str(directory), load_inplace=True)):
                    raise RuntimeError("vLLM has not taken the adapter")
                # Without load_inplace: vLLM would load the file again at every step of a request that has it.
                self._adapter = LoRARequest(*ADAPTER, str(directory))
            await self._llm.update_weight_version(str(manifest.version))
        except EngineDeadError:
            raise
        except Exception as error:
            raise WeightsMismatch(
                f"loading {directory} failed halfway; the engine cannot be used any more: {error}; restart the worker"
            ) from error

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """The engine is paused inside. After an error it stays paused, because it cannot be used any more."""
        self._unpaused.clear()
        try:
            await self._llm.pause_generation(mode="keep", clear_cache=self._recomputes_kv)
            with self._silent():
                yield
                await self._llm.resume_generation()
        finally:
            self._unpaused.set()

    @contextmanager
    def _silent(self) -> Iterator[None]:
        """Inside, the engine owes no token."""
        self._is_silent = True
        try:
            yield
        finally:
            self._is_silent = False
            self._token_at = time.monotonic()

    async def check(self, manifest: Manifest, name: str) -> None:
        """Raises: WeightsMismatch when the engine's log-probabilities of the canary differ from the learner's, or when
        a tensor that has changed since the last check has not changed in the engine."""
        if manifest.adapter is None:  # vLLM's checksums, over the whole model, do not cover an adapter
            await self._refuse_stale(manifest, name)
        computed = await self.score(manifest.canary.token_ids)
        difference = float(np.abs(computed - np.asarray(manifest.canary.logprobs)).mean())
        if not difference <= manifest.canary.tolerance:
            raise WeightsMismatch(
                f"after loading {name} the engine's log-probabilities differ from the learner's by {difference:.4g} "
                f"on average (allowed {manifest.canary.tolerance:g}): vLLM computes this model differently from "
                "transformers, or did not load all weights; if a restarted worker reports the same, use another "
                "model.path or model.dtype, and no quantisation"
            )

    async def _refuse_stale(self, manifest: Manifest, name: str) -> None:
        """Raises: WeightsMismatch."""
        with self._silent():
            digests = digests_of(await self._llm.compute_weight_checksums())
        now = Loaded(manifest.tensors, digests)
        stale = stale_tensors(self._checked, now) if self._checked else []
        if stale:
            raise WeightsMismatch(
                f"after loading {name} {len(stale)} of the engine's {len(now.digests)} tensors are still of an older "
                f"version, such as {stale[0]}: it does not have the published weights; restart the worker"
            )
        self._checked = now

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float64]:
        """Log-probabilities [C - 1] of tokens 1.. of a text under the loaded weights, temperature 1."""
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        output = await self._run(token_ids, params)
        positions = output.prompt_logprobs[1:]
        pairs = zip(token_ids[1:], positions, strict=True)
        return np.array([position[token].logprob for token, position in pairs])

    async def _run(self, prompt: Sequence[int], params: SamplingParams) -> Any:
        """The final output of one request. Raises: EngineDied."""
        salt = None
        if not self._recomputes_kv:  # new turns must not use the cache of an older version; vLLM queues them in a pause
            await self._unpaused.wait()
            salt = self.loaded or "base"
        tokens = tokens_input(list(prompt), cache_salt=salt)
        request = self._llm.generate(tokens, params, f"request-{next(self._ids)}", lora_request=self._adapter)
        try:
            outputs = [output async for output in request]
        except (EngineDeadError, EngineGenerateError) as error:  # after the latter vLLM reads no output any more
            raise await self._died(error) from error
        return outputs[-1]

    async def _died(self, error: Exception) -> EngineDied:
        printed = await asyncio.to_thread(self._engine_output.last_error)
        reason = self._hung or printed or (error.__cause__ and repr(error.__cause__))
        return EngineDied(f"the vLLM engine died: {reason or 'it printed no error (killed, or out of memory?)'}")

    def close(self) -> None:
        """Stop the engine's process."""
        self._llm.shutdown()
        del self._llm
        gc.collect()  # vLLM's finaliser must not wait for interpreter exit, where it fails with a stack trace

    @asynccontextmanager
    async def _busy(self) -> AsyncIterator[None]:
        began = time.monotonic()
        if self._running == 0:
            self._busy_since = began
            self._watching = asyncio.create_task(self._end_when_it_hangs())
        self._running += 1
        try:
            yield
        finally:
            self.request_s += time.monotonic() - began
            self._running -= 1
            if self._running == 0:
                assert self._watching is not None
                self._watching.cancel()
                self._busy_s += time.monotonic() - self._busy_since


def tokens_to_first(stops: Sequence[str], token_ids: list[int], tokenizer: Any) -> int:
    """Tokens of a turn up to and with the first of `stops`; all if none is in it. The policy may also write a tag
    letter by letter that is a single token, for which alone vLLM looks."""

    def has_stop(count: int) -> bool:
        text = tokenizer.decode(token_ids[:count], skip_special_tokens=False)
        return any(stop in text for stop in stops)

    if not has_stop(len(token_ids) - 1):
        return len(token_ids)
    return bisect.bisect_left(range(len(token_ids)), True, key=has_stop)


def engine_arguments(model: str, config: Config, is_cpu: bool) -> dict[str, Any]:
    """Arguments of AsyncEngineArgs. Raises: ConfigError for an option that vLLM does not know."""
    options = config.rollout.vllm.model_dump(exclude_none=True)
    extra = config.rollout.vllm.model_extra or {}
    known = [option.name for option in dataclasses.fields(AsyncEngineArgs)]
    refuse_unknown("rollout.vllm", extra, known, f"vLLM {vllm.__version__}")
    if is_cpu:
        options["enable_chunked_prefill"] = False  # seeded requests: "CPU Generator does not use offset"
        most = max(config.episode.max_tokens, config.rollout.max_num_seqs, CPU_BATCH_TOKENS)
        options.setdefault("max_num_batched_tokens", most)
        options["scheduler_cls"] = GATHERING
    rank = config.learner.lora.rank
    if not rank:
        options["worker_extension_cls"] = STAGING
    elif not is_cpu and config.model.dtype == "float32":
        raise ConfigError("learner.lora needs model.dtype = 'bfloat16' on a GPU: vLLM's kernels have no float32")
    else:
        options |= {"enable_lora": True, "max_lora_rank": min(r for r in ADAPTER_RANKS if r >= rank), "max_loras": 1}
        if names := config.learner.lora.names:  # else every layer has room for an adapter, and computes it
            options["lora_target_modules"] = list(names)
    return (
        {"enable_prefix_caching": True, "use_tqdm_on_load": False}
        | options
        | {
            "model": model,
            "tokenizer_mode": "hf",
            "dtype": config.model.dtype,
            "max_model_len": config.episode.max_tokens,
            "max_num_seqs": config.rollout.max_num_seqs,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "disable_log_stats": True,
            "enable_sleep_mode": config.run.colocate and not is_cpu,  # on a CPU it frees nothing
        }
    )
