"""Settings of the rollout workers."""

from __future__ import annotations

from pydantic import Field

from cusearch_async.config.section import Section


class RolloutConfig(Section):
    workers: int = Field(1, ge=1)
    """Number of rollout workers that `cusearch launch` starts, each with its own engine."""
    max_episodes: int = Field(192, ge=1)
    """Maximum number of episodes in flight per worker. Finished episodes that wait for room in the buffer are not
    counted.
    """
    max_sequences: int = Field(128, ge=1)
    """Maximum number of sequences that the engine decodes at once."""
    kv_cache_mib: int | None = Field(None, ge=16)
    """Size of the KV cache; None uses vLLM's share of the device memory."""
    block_size: int | None = None
    """Tokens in a block of vLLM's KV cache; None for vLLM's default."""
    enforce_eager: bool = False
    """Do not compile the model: it starts faster, and decodes more slowly on a GPU."""
    canary_every: int = Field(10, ge=1)
    """The engine's log-probabilities are compared with the learner's after every so many loaded versions."""
    cores: tuple[int, ...] = ()
    """CPU cores of the workers, divided among them; empty for all."""
    gpus: tuple[int, ...] = ()
    """CUDA devices of the workers, one each, in order; empty for all."""
