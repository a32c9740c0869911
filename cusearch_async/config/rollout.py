"""The rollout workers."""

from __future__ import annotations

from pydantic import Field

from cusearch_async.config.section import Section


class RolloutConfig(Section):
    workers: int = Field(1, ge=1)
    """Rollout workers that `cusearch launch` starts, each with an engine of its own."""
    max_episodes: int = Field(192, ge=1)
    """Episodes at play per worker; those that wait for room in the buffer are not counted."""
    max_sequences: int = Field(128, ge=1)
    """Sequences that the engine decodes at once."""
    kv_cache_mib: int | None = Field(None, ge=16)
    """KV-cache room; None leaves it to vLLM's share of the device memory."""
    block_size: int | None = None
    """Tokens in a block of vLLM's KV cache; None for vLLM's own choice."""
    enforce_eager: bool = False
    """Do not compile the model: it starts sooner and decodes more slowly on a GPU."""
    canary_every: int = Field(10, ge=1)
    """Published versions between two checks that the engine computes what the learner computes."""
    cores: tuple[int, ...] = ()
    """CPU cores of a worker, and with several workers split among them; empty for all."""
    gpus: tuple[int, ...] = ()
    """CUDA devices of the workers, one each in order; empty for all."""
