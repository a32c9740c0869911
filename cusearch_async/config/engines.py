"""Settings that are passed on to vLLM and to DeepSpeed, by their names there.

What other settings of the config decide, and what would make the run wrong, is refused."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from cusearch_async.config.section import Free, Section
from cusearch_async.errors import ConfigError

_OWN_LOGPROBS = "the loss divides by the log-probabilities of the very distribution that was sampled from"
_OTHER_DISTRIBUTION = "tokens would be sampled from another distribution than the one the log-probabilities are of"
_ONE_MODEL = "learner and engines must have the same model; use model.path"
_ONE_ADAPTER = "the policy is the only adapter; use learner.lora"
_ONE_ENGINE = "pausing, loading weights and their versions are of one engine; use more rollout.workers"

VLLM_REFUSED = {
    "model": "use model.path",
    "tokenizer": "use model.path",
    "dtype": "use model.dtype",
    "max_model_len": "it is the longest episode, from the keys of [episode]",
    "max_num_seqs": "use rollout.max_num_seqs",
    "seed": "use run.seed",
    "logprobs_mode": _OWN_LOGPROBS,
    "generation_config": _OTHER_DISTRIBUTION,
    "override_generation_config": _OTHER_DISTRIBUTION,
    "logits_processors": _OTHER_DISTRIBUTION,
    "speculative_config": "drafted tokens would get the version of another step",
    "spec_method": "drafted tokens would get the version of another step",
    "spec_model": "drafted tokens would get the version of another step",
    "spec_tokens": "drafted tokens would get the version of another step",
    "load_format": "the engine loads what the learner publishes",
    "model_weights": _ONE_MODEL,
    "revision": _ONE_MODEL,
    "hf_overrides": _ONE_MODEL,
    "hf_config_path": _ONE_MODEL,
    "model_impl": _ONE_MODEL,
    "trust_remote_code": "the learner does not run code of a model either",
    "enable_lora": "use learner.lora",
    "max_lora_rank": "use learner.lora.rank",
    "max_loras": _ONE_ADAPTER,
    "max_cpu_loras": _ONE_ADAPTER,
    "default_mm_loras": _ONE_ADAPTER,
    "lora_dtype": "it is model.dtype",
    "data_parallel_size": _ONE_ENGINE,
    "pipeline_parallel_size": _ONE_ENGINE,
    "distributed_executor_backend": _ONE_ENGINE,
    "nnodes": _ONE_ENGINE,
    "stream_interval": "turns are used as a whole",
    "worker_cls": "it is the run's own",
    "worker_extension_cls": "it is the run's own",
    "scheduler_cls": "it is the run's own",
    "enable_sleep_mode": "it is the run's own",
    "weight_transfer_config": "it is the run's own",
    "disable_log_stats": "it is the run's own",
}
"""vLLM's option -> why it cannot be set."""

ZERO_REFUSED = {
    "stage": "use learner.zero_stage",
    "zero_quantized_weights": "ranks would compute with rounded weights",
    "zero_quantized_nontrainable_weights": "ranks would compute with rounded weights",
    "zero_quantized_gradients": "gradients would be rounded",
    "zenflow": "optimizer steps would be late",
    "elastic_checkpoint": "checkpoints have a form of their own",
    "cpu_offload": "use offload_optimizer = {device = 'cpu'}",
    "cpu_offload_param": "use offload_param = {device = 'cpu'}",
}
"""Option of DeepSpeed's zero_optimization -> why it cannot be set."""


class VllmConfig(Section):
    """Options of vLLM's AsyncEngineArgs. These are read by `cusearch check`; any other that vLLM knows may be given."""

    model_config = ConfigDict(extra="allow")

    tensor_parallel_size: Free[int] = Field(1, ge=1)
    """GPUs of one engine; rollout.gpus is divided into groups of as many."""
    gpu_memory_utilization: Free[float | None] = Field(None, gt=0, le=1)
    """Share of a GPU's memory for weights, KV cache and one forward pass; None: vLLM's 0.92."""
    kv_cache_memory_bytes: Free[int | None] = Field(None, ge=1 << 24)
    """Size of the KV cache; None: what is left of the share."""
    block_size: Free[int | None] = Field(None, ge=1)
    """Tokens in a block of the KV cache; None: vLLM's default."""
    enforce_eager: Free[bool] = False
    """No compilation and no CUDA graphs: starts faster, decodes more slowly on a GPU."""
    max_num_batched_tokens: Free[int | None] = Field(None, ge=1)
    """Tokens of one engine step; None: vLLM's default."""
    enable_chunked_prefill: Free[bool | None] = None
    """Cut long prompts to fill a step; None: vLLM's default. Always off on a CPU, where a seeded request whose prompt
    is cut ends the engine."""
    quantization: str | None = None
    """Quantise published weights while loading, like `fp8`. The engine then samples from another policy than the
    learner's, which loss.correction weighs."""
    kv_cache_dtype: str = "auto"
    """Data type of the KV cache; the same holds for one that rounds."""

    @property
    def is_quantised(self) -> bool:
        """Whether the engine rounds what the learner does not."""
        return self.quantization is not None or self.kv_cache_dtype != "auto"

    @model_validator(mode="after")
    def _refuse(self) -> VllmConfig:
        _refuse_keys("vLLM", self.model_extra or {}, VLLM_REFUSED)
        return self


class DeepSpeedConfig(Section):
    """Options of DeepSpeed's config."""

    zero_optimization: Free[dict[str, Any]] = Field({})
    """Options of ZeRO: offload_optimizer, offload_param, reduce_bucket_size, zero_hpz_partition_size, …"""
    grad_accum_dtype: Literal["fp32", "bf16"] | None = None
    """Data type in which gradients are accumulated; None: the model's. `fp32` takes 4 bytes per parameter."""
    communication_data_type: Free[Literal["fp32", "bf16"] | None] = None
    """Data type in which gradients are summed over ranks; None: the gradients' own."""

    @model_validator(mode="after")
    def _refuse(self) -> DeepSpeedConfig:
        _refuse_keys("DeepSpeed's zero_optimization", self.zero_optimization, ZERO_REFUSED)
        # what DeepSpeed has of the optimizer on NVMe is in no checkpoint that Adam could continue from
        for part, devices in (("offload_optimizer", ["cpu"]), ("offload_param", ["cpu", "nvme"])):
            device = self.offload(part)
            if device not in (None, "none", *devices):
                wanted = " or ".join(map(repr, devices))
                raise ValueError(f"zero_optimization.{part} needs device = {wanted}, got {device!r}")
        return self

    def offload(self, part: str) -> Any:
        """The device of the offloaded part; None when it stays on the GPU."""
        given = self.zero_optimization.get(part)
        device = given.get("device") if isinstance(given, Mapping) else given
        return None if device == "none" else device


def refuse_unknown(key: str, names: Iterable[str], known: Collection[str], whose: str) -> None:
    """Raises: ConfigError for a name in section `key` that is not `known` by what is installed."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{key}.{name}: {whose} has no such option{hint}")


def _refuse_keys(whose: str, given: Mapping[str, Any], refused: Mapping[str, str]) -> None:
    for name in given.keys() & refused.keys():
        raise ValueError(f"{name} cannot be passed on to {whose}: {refused[name]}")
