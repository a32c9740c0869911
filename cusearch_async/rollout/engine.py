"""The adapter to vLLM: token ids in, token ids out. No other module imports vLLM.

Every sampled token has its log-probability under the sampling policy (after temperature) and the weight version that
sampled it. Weights are replaced while episodes are in flight: the engine is paused between two decoding steps, running
requests keep their tokens, and their KV cache is computed again with the new weights.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm import AsyncEngineArgs, SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from cusearch_async.config import Config
from cusearch_async.errors import EngineDied, WeightsMismatch, WeightsUnavailable, first_line
from cusearch_async.lifecycle.progress import log_waiting
from cusearch_async.rollout.engine_output import EngineOutput
from cusearch_async.transport.weights import TENSORS, Canary, WeightStore

log = logging.getLogger(__name__)

CPU_BATCH_TOKENS = 4096
"""Maximum number of tokens of one engine step on CPU; prompts that do not fit wait for the next step."""


@dataclass(slots=True)
class _Pulse:
    """The time of the engine's last token for any request, or of its last resume."""

    at: float = 0.0

    def listen(self, llm: AsyncLLM) -> None:
        """Record every step of the engine. vLLM itself reports only the last token of a request."""
        processor = llm.output_processor
        process = processor.process_outputs

        def processed(*args: Any, **options: Any) -> Any:
            self.at = time.monotonic()
            return process(*args, **options)

        processor.process_outputs = processed


@dataclass(frozen=True, slots=True)
class Turn:
    """The tokens that the policy sampled in one turn, its stop tag included."""

    token_ids: list[int]  # [S]
    logprobs: NDArray[np.float32]  # [S]
    versions: NDArray[np.int32]  # [S]


class Engine:
    def __init__(self, llm: AsyncLLM, tokenizer: Any, engine_output: EngineOutput) -> None:
        self._llm = llm
        self._engine_output = engine_output
        self._tokenizer = tokenizer
        self._stop_settings: dict[tuple[str, ...], dict[str, Any]] = {}
        """Texts that end a turn -> settings for vLLM."""
        self._ids = itertools.count()
        self.version = -1
        """Version of the loaded weights, in learner steps; -1 before any published weights are loaded."""
        self.loaded = ""
        """Directory of the loaded weights in the weight store."""
        self.sampled_tokens = 0
        self._running = 0
        self._busy_s = 0.0
        self._busy_since = 0.0
        self._pulse = _Pulse()
        self._pulse.listen(llm)
        self._is_paused = False

    @classmethod
    def start(cls, model: str, tokenizer: Any, config: Config) -> Engine:
        """Load `model` (a local folder or a Hub id) into a new engine. Takes seconds to minutes.

        Raises: EngineDied with the engine's last error."""
        rollout = config.rollout
        optional: dict[str, Any] = {"block_size": rollout.block_size}
        if current_platform.is_cpu():
            # A seeded request whose prefill is cut in pieces kills the engine ("CPU Generator does not use offset").
            optional["enable_chunked_prefill"] = False
            optional["max_num_batched_tokens"] = max(config.episode.max_tokens, CPU_BATCH_TOKENS)
        if rollout.kv_cache_mib:
            optional["kv_cache_memory_bytes"] = rollout.kv_cache_mib << 20
        arguments = AsyncEngineArgs(
            model=model,
            dtype=config.model.dtype,
            max_model_len=config.episode.max_tokens,
            max_num_seqs=rollout.max_sequences,
            enforce_eager=rollout.enforce_eager,
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            disable_log_stats=True,
            use_tqdm_on_load=False,
            **{name: value for name, value in optional.items() if value is not None},
        )
        engine_output = EngineOutput()
        try:
            with log_waiting(log, f"waiting for vLLM to load {model}"), engine_output.listening():
                llm = AsyncLLM.from_engine_args(arguments)
        except (RuntimeError, ValueError, OSError) as error:
            raise EngineDied(
                f"vLLM cannot start with {model!r}: {engine_output.last_error() or first_line(error)}"
            ) from error
        return cls(llm, tokenizer, engine_output)

    @property
    def busy_s(self) -> float:
        """Seconds so far in which at least one request was being decoded."""
        return self._busy_s + (time.monotonic() - self._busy_since if self._running else 0.0)

    @property
    def last_token_age_s(self) -> float:
        """Seconds since the engine produced a token, or since its first request; 0 without requests, or while it is
        paused to load weights."""
        if self._is_paused or not self._running:
            return 0.0
        return time.monotonic() - max(self._pulse.at, self._busy_since)

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
            **self._stopping_at(tuple(stops)),
        )
        async with self._busy():
            output = await self._run(prompt, params)
        completion = output.outputs[0]
        token_ids = list(completion.token_ids)
        logprobs = np.asarray(completion.logprobs.logprobs, dtype=np.float32)
        versions = np.full(len(token_ids), self.version, dtype=np.int32)
        for span in completion.weight_versions or ():
            versions[span.start : span.end] = _version_number(span.version)
        self.sampled_tokens += len(token_ids)
        return Turn(token_ids, logprobs, versions)

    def _stopping_at(self, stops: tuple[str, ...]) -> dict[str, Any]:
        """vLLM's settings to end a turn: stop tokens if all of `stops` are single tokens, else stop texts."""
        if stops not in self._stop_settings:
            pieces = [self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in stops]
            self._stop_settings[stops] = (
                {"stop_token_ids": [piece[0] for piece in pieces], "detokenize": False}
                if all(len(piece) == 1 for piece in pieces)
                else {"stop": list(stops), "include_stop_str_in_output": True}
            )
        return self._stop_settings[stops]

    async def load(self, store: WeightStore, name: str, check: bool) -> None:
        """Load the weights `store/name`; requests in flight continue with them.

        The version is verified in a thread before the engine is paused, so episodes continue during that. With `check`,
        the engine's log-probabilities are then compared with the learner's.
        Raises: WeightsUnavailable (nothing has changed); WeightsMismatch (the engine must not be used any more);
        EngineDied."""
        manifest = await asyncio.to_thread(store.verify, name)
        directory = store.directory(name)
        try:
            async with self._paused():
                if is_there := (directory / TENSORS).exists():
                    await self._swap(directory, manifest.version)
        except EngineDeadError as error:
            raise await self._died(error) from error
        if not is_there:
            raise WeightsUnavailable(f"{directory} was removed before it was loaded")
        self.version, self.loaded = manifest.version, name
        if check:
            await self.check(manifest.canary, name)

    async def _swap(self, directory: Path, version: int) -> None:
        try:
            await self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(directory)})
            await self._llm.update_weight_version(str(version))
        except EngineDeadError:
            raise
        except Exception as error:
            raise WeightsMismatch(
                f"loading {directory} failed halfway; the engine cannot be used any more: {error}; restart the worker"
            ) from error

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """The engine is paused inside. After an error it stays paused, because it cannot be used any more."""
        await self._llm.pause_generation(mode="keep", clear_cache=True)
        self._is_paused = True
        try:
            yield
            await self._llm.resume_generation()
        finally:
            self._is_paused = False
            self._pulse.at = time.monotonic()

    async def check(self, canary: Canary, name: str) -> None:
        """Raises: WeightsMismatch when the engine's log-probabilities of the canary differ from the learner's."""
        computed = await self.score(canary.token_ids)
        difference = float(np.abs(computed - np.asarray(canary.logprobs)).mean())
        if not difference <= canary.tolerance:
            raise WeightsMismatch(
                f"after loading {name} the engine's log-probabilities differ from the learner's by {difference:.4g} "
                "on average "
                f"(allowed {canary.tolerance:g}): it does not have the published weights"
            )

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float64]:
        """Log-probabilities [C - 1] of tokens 1.. of a text under the loaded weights, temperature 1."""
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        output = await self._run(token_ids, params)
        positions = output.prompt_logprobs[1:]
        pairs = zip(token_ids[1:], positions, strict=True)
        return np.array([position[token].logprob for token, position in pairs])

    async def _run(self, prompt: Sequence[int], params: SamplingParams) -> Any:
        """The final output of one request. Raises: EngineDied."""
        request = self._llm.generate({"prompt_token_ids": list(prompt)}, params, f"request-{next(self._ids)}")
        try:
            outputs = [output async for output in request]
        except (EngineDeadError, EngineGenerateError) as error:  # after the latter vLLM reads no output any more
            raise await self._died(error) from error
        return outputs[-1]

    async def _died(self, error: Exception) -> EngineDied:
        reason = await asyncio.to_thread(self._engine_output.last_error) or (error.__cause__ and repr(error.__cause__))
        return EngineDied(f"the vLLM engine died: {reason or 'it printed no error (killed, or out of memory?)'}")

    def close(self) -> None:
        """Stop the engine's process."""
        self._llm.shutdown()
        del self._llm
        gc.collect()  # vLLM's finaliser must not wait for interpreter exit, where it fails with a stack trace

    @asynccontextmanager
    async def _busy(self) -> AsyncIterator[None]:
        if self._running == 0:
            self._busy_since = time.monotonic()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self._busy_s += time.monotonic() - self._busy_since


def _version_number(label: str) -> int:
    """The version of a label; -1 for vLLM's initial label, which is a word."""
    return int(label) if label.lstrip("-").isdigit() else -1
