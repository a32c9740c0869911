"""Settings of the rollout workers."""

from __future__ import annotations

from pydantic import Field

from cusearch_async.config.engines import VllmConfig
from cusearch_async.config.section import Free, Numbers, Section


class RolloutConfig(Section):
    workers: Free[int] = Field(1, ge=1)
    """Number of rollout workers that `cusearch launch` starts, each with its own engine."""
    max_episodes: Free[int] = Field(192, ge=1)
    """Maximum number of episodes in flight per worker. Finished episodes that wait for room in the buffer are not
    counted.
    """
    max_sequences: Free[int] = Field(128, ge=1)
    """Maximum number of sequences that the engine decodes at once."""
    recompute_kv: bool = True
    """After new weights are loaded, compute the KV cache of the turns in flight again. Without it they end on that of
    older weights: a shorter pause, and the importance ratio has more to correct. New turns never use it."""
    canary_every: Free[int] = Field(10, ge=1)
    """After every so many loaded versions, the engine's log-probabilities are compared with the learner's, and the
    checksums of its tensors with those of the last time: all that the learner has changed must have changed."""
    cores: Free[Numbers] = ()
    """CPU cores of the engines, divided among the workers; empty for all. What plays the episodes takes any core."""
    gpus: Free[Numbers] = ()
    """CUDA devices of the workers of a machine, `vllm.tensor_parallel_size` for each. A worker takes a group that no
    other worker of this machine has. Empty: the first free ones."""
    vllm: VllmConfig = VllmConfig()
