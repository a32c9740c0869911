"""Settings of the rollout workers."""

from __future__ import annotations

from pydantic import Field

from cusearch_async.config.engines import VllmConfig
from cusearch_async.config.section import Free, Numbers, Section


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
    canary_every: Free[int] = Field(10, ge=1)
    """Loaded versions between two checks of the engine against the learner (log-probabilities of a fixed text,
    checksums of tensors)."""
    cores: Free[Numbers] = ()
    """CPU cores of the engines, divided among the workers; empty: all. The episode loop uses any core."""
    gpus: Free[Numbers] = ()
    """CUDA devices of a machine's workers, `vllm.tensor_parallel_size` for each; a worker takes a group that no other
    has. Empty: the first free ones."""
    vllm: VllmConfig = VllmConfig()
