"""Settings of the engines: of rollout workers, and what is passed on to vLLM and DeepSpeed by their names there.

What other settings of the config decide, and what would make the run wrong, is refused."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from cusearch_async.config.section import Free, Numbers, Section, nearest
from cusearch_async.errors import ConfigError


def _because(reason: str, *options: str) -> dict[str, str]:
    return dict.fromkeys(options, reason)


VLLM_REFUSED = {
    **_because("use model.path", "model", "tokenizer"),
    **_because("use model.dtype", "dtype", "lora_dtype"),
    **_because("it is the longest episode, from the keys of [episode]", "max_model_len"),
    **_because("use rollout.max_num_seqs", "max_num_seqs"),
    **_because("use run.seed", "seed"),
    **_because(
        "the loss divides by the log-probabilities of the very distribution that was sampled from",
        *("logprobs_mode", "generation_config", "override_generation_config", "logits_processors"),
    ),
    **_because(
        "drafted tokens would get the version of another step",
        *("speculative_config", "spec_method", "spec_model", "spec_tokens"),
    ),
    **_because("the engine loads what the learner publishes", "load_format"),
    **_because(
        "learner and engines must have the same model; use model.path",
        *("model_weights", "revision", "hf_overrides", "hf_config_path", "model_impl"),
    ),
    **_because("the learner does not run code of a model either", "trust_remote_code"),
    **_because("use learner.lora", "enable_lora"),
    **_because("use learner.lora.rank", "max_lora_rank"),
    **_because("use learner.lora.targets", "lora_target_modules"),
    **_because("set HF_TOKEN in the environment", "hf_token"),
    **_because("the policy is the only adapter; use learner.lora", "max_loras", "max_cpu_loras", "default_mm_loras"),
    **_because(
        "pausing, loading weights and their versions are of one engine; use more rollout.workers",
        *("data_parallel_size", "pipeline_parallel_size", "distributed_executor_backend", "nnodes"),
    ),
    **_because("turns are used as a whole", "stream_interval"),
    **_because(
        "the run sets it",
        *("tokenizer_mode", "worker_cls", "worker_extension_cls", "scheduler_cls", "enable_sleep_mode"),
        *("weight_transfer_config", "disable_log_stats"),
    ),
}
"""vLLM's option -> why it cannot be set."""

ZERO_REFUSED = {
    **_because("use learner.zero_stage", "stage"),
    **_because(
        "ranks would compute with rounded weights", "zero_quantized_weights", "zero_quantized_nontrainable_weights"
    ),
    **_because("gradients would be rounded", "zero_quantized_gradients"),
    **_because("optimizer steps would be late", "zenflow"),
    **_because("checkpoints have another form", "elastic_checkpoint"),
    **_because("use offload_optimizer = {device = 'cpu'}", "cpu_offload"),
    **_because("use offload_param = {device = 'cpu'}", "cpu_offload_param"),
}
"""Option of DeepSpeed's zero_optimization -> why it cannot be set."""


def refuse_unknown(key: str, names: Iterable[str], known: Collection[str], whose: str) -> None:
    """Raises: ConfigError for a name in section `key` that is not `known` by what is installed."""
    for name in names:
        if name not in known:
            near = nearest(name, known)
            hint = f"; did you mean {near}?" if near else ""
            raise ConfigError(f"{key}.{name}: {whose} has no such option{hint}")


def _refuse_keys(whose: str, given: Mapping[str, Any], refused: Mapping[str, str]) -> None:
    for name in given.keys() & refused.keys():
        raise ValueError(f"{name} cannot be passed on to {whose}: {refused[name]}")


class VllmConfig(Section):
    """Options of vLLM's AsyncEngineArgs. These are named because they may change between two starts, or because our
    code reads them. Any other that vLLM knows may be given, and is then part of what the run means."""

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
    """Data type in which gradients are summed over ranks; None: the model's, also where grad_accum_dtype is fp32."""

    @model_validator(mode="after")
    def _refuse(self) -> DeepSpeedConfig:
        _refuse_keys("DeepSpeed's zero_optimization", self.zero_optimization, ZERO_REFUSED)
        # what DeepSpeed has of the optimizer on NVMe is in no checkpoint that Adam could continue from
        for part, devices in (("offload_optimizer", ["cpu"]), ("offload_param", ["cpu", "nvme"])):
            device, given = self.offload(part), self.zero_optimization.get(part, {})
            if not isinstance(given, Mapping):
                raise ValueError(f"zero_optimization.{part} must be a table, like {{device = 'cpu'}}, got {given!r}")
            if device not in (None, *devices):
                wanted = " or ".join(map(repr, devices))
                raise ValueError(f"zero_optimization.{part} needs device = {wanted}, got {device!r}")
        return self

    def offload(self, part: str) -> Any:
        """The device of the offloaded part; None when it stays on the GPU."""
        given = self.zero_optimization.get(part)
        device = given.get("device") if isinstance(given, Mapping) else None
        return None if device == "none" else device


class RolloutConfig(Section):
    workers: Free[int] = Field(1, ge=1)
    """Rollout workers that `cusearch launch` starts, each with its own engine."""
    max_episodes: Free[int] = Field(192, ge=1)
    """Maximum number of episodes in flight per worker; finished ones that wait for room in the buffer do not count."""
    max_num_seqs: Free[int] = Field(128, ge=1)
    """Maximum number of sequences that the engine decodes at once."""
    recompute_kv: bool = True
    """After loading weights, recompute the KV cache of the turns in flight; otherwise they end on the older one: a
    shorter pause, and more for the importance ratio to correct."""
    drain_s: Free[float] = Field(0.0, ge=0)
    """Seconds for which a worker that gets SIGTERM finishes its episodes; longer ones are left to others. For machines
    that are taken away with notice: 120 where that is two minutes."""
    canary_every: Free[int] = Field(10, ge=1)
    """Loaded versions between two checks of the engine against the learner (log-probabilities of a fixed text,
    checksums of tensors)."""
    cores: Free[Numbers] = ()
    """CPU cores of the engines, divided among the workers that `launch` starts; one that is started by hand has all.
    Empty: all. The episode loop uses any core."""
    gpus: Free[Numbers] = ()
    """CUDA devices of a machine's workers, numbered as in learner.gpus, `vllm.tensor_parallel_size` for each; a worker
    takes a group that no other has. Empty: the first free ones."""
    vllm: VllmConfig = VllmConfig()
