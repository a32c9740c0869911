"""What vLLM's CUDA build makes of our engine's arguments, on a machine without a GPU: python -m
tests.cuda_contract.fake_cuda SOURCES FOLDER NAME...

SOURCES is what `wheels.unpacked` makes. The platform is vLLM's own for CUDA, told that it has eight H100 of 80 GB.
Prints one JSON line for each shipped config that is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from cusearch_async.cli.preflight.shapes import PUBLISHED
from cusearch_async.config import Config, load_config, shipped_configs
from cusearch_async.lifecycle.placement import configure_process

CARD_BYTES = 80 << 30


class Caught(Exception):
    """The configuration that the engine would have started with."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


def as_on_a_gpu(sources: Path) -> Any:
    """Make vLLM importable from `sources`; returns its module of platforms, with the card in place."""
    sys.path.insert(0, str(sources))
    import vllm._custom_ops
    import vllm.config.vllm

    vllm.config.vllm.HAS_TRITON = True
    vllm._custom_ops.cutlass_scaled_mm_supports_block_fp8 = lambda capability: True  # compiled, and asked on import
    from vllm import platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Card(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(major=9, minor=0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return CARD_BYTES

        @classmethod
        def device_count(cls) -> int:
            return 8

    platforms._current_platform = Card()
    return platforms


def as_used(name: str) -> Config:
    """A shipped config; the paper's on top of their base."""
    files = shipped_configs()
    return load_config([files["paper/base"], files[name]] if name.startswith("paper/") else files[name])


def write_model(config: Config, folder: Path) -> Path:
    """config.json of the model's shape: vLLM's configuration needs no weights."""
    if config.model.path not in PUBLISHED:
        return Path(config.model.location)
    place = folder / Path(config.model.path).name
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(PUBLISHED[config.model.path]), encoding="utf-8")
    return place


def started_with(config: Config, model: Path) -> Any:
    """vLLM's configuration, from where `Engine.start` would hand its arguments to vLLM."""
    from vllm.v1.engine.async_llm import AsyncLLM

    def catch(arguments: Any) -> None:
        raise Caught(arguments.create_engine_config())

    AsyncLLM.from_engine_args = catch
    from cusearch_async.rollout.engine import Engine

    try:
        Engine.start(str(model), None, config)
    except Caught as caught:
        return caught.config
    raise AssertionError("Engine.start did not start vLLM")


def summary(vllm_config: Any) -> dict[str, Any]:
    from vllm import envs
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    model = vllm_config.model_config
    with set_current_vllm_config(vllm_config):
        backend = get_attn_backend(model.get_head_size(), model.dtype, vllm_config.cache_config.cache_dtype)
    return {
        "start_method": envs.VLLM_WORKER_MULTIPROC_METHOD,
        "v2_model_runner": bool(vllm_config.use_v2_model_runner),
        "memory_share": vllm_config.cache_config.gpu_memory_utilization,
        "kv_cache": vllm_config.cache_config.kv_cache_memory_bytes,
        "batched_tokens": vllm_config.scheduler_config.max_num_batched_tokens,
        "tensor_parallel": vllm_config.parallel_config.tensor_parallel_size,
        "attention": backend.get_name(),
        "chunked_prefill": bool(vllm_config.scheduler_config.enable_chunked_prefill),
        "async_scheduling": bool(vllm_config.scheduler_config.async_scheduling),
        "prefix_caching": bool(vllm_config.cache_config.enable_prefix_caching),
        "max_num_seqs": vllm_config.scheduler_config.max_num_seqs,
        "max_model_len": model.max_model_len,
        "logprobs": model.logprobs_mode,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": vllm_config.device_config.device_type,
        "extension": vllm_config.parallel_config.worker_extension_cls,
    }


def main() -> None:
    sources, folder = map(Path, sys.argv[1:3])
    configure_process([])
    as_on_a_gpu(sources)
    configs = {name: as_used(name) for name in sys.argv[3:]}
    for name, config in configs.items():
        found = summary(started_with(config, write_model(config, folder)))
        sys.stdout.write(json.dumps({"config": name, **found}) + "\n")


if __name__ == "__main__":
    main()
