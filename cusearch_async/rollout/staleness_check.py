"""Whether an engine has taken new weights: tensors that changed between two versions must have changed in the engine.

A canary cannot show it at a learning rate of 1e-6 in bfloat16: one step moves its log-probabilities by less than the
rounding of another kernel does. Checksums of the engine's tensors can.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from cusearch_async.weights.tensor_file import TensorRecord

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""vLLM's module -> the modules of a published version that are in it, in order."""
_NOTHING = hashlib.sha256(b"").hexdigest()
"""The checksum of a tensor that vLLM has repacked for its kernels: it cannot be compared."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine after it has loaded a version."""

    published: Mapping[str, TensorRecord]
    """The version's tensors by their Hugging Face names."""
    digests: Mapping[str, frozenset[str]]
    """vLLM's name of a tensor -> its checksums on all ranks of the engine."""


def digests_of(ranks: list[dict[str, str]]) -> dict[str, frozenset[str]]:
    """The answer of AsyncLLM.compute_weight_checksums, with the checksums of all ranks of an engine together."""
    found: dict[str, set[str]] = defaultdict(set)
    for rank in ranks:
        for name, digest in rank.items():
            if digest != _NOTHING:
                found[name.rpartition(":")[2]].add(name.rpartition(":")[0] + digest)
    return {name: frozenset(digests) for name, digests in found.items()}


def stale_tensors(before: Loaded, now: Loaded) -> list[str]:
    """The engine's tensors that have not changed, although their published ones have."""
    changed = {name for name, record in now.published.items() if before.published.get(name) != record}
    return sorted(
        name
        for name, digests in now.digests.items()
        if digests == before.digests.get(name) and not changed.isdisjoint(_published_names(name))
    )


def _published_names(name: str) -> list[str]:
    """The published tensors that are in a tensor of vLLM's."""
    module = next((part for part in name.split(".") if part in FUSED), None)
    return [name.replace(module, part) for part in FUSED[module]] if module else [name]
