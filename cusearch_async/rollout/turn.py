"""One turn of an episode, as the engine sampled it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Turn:
    """The tokens that the policy sampled in one turn, its stop tag included."""

    token_ids: list[int]  # [S]
    logprobs: NDArray[np.float32]  # [S]
    versions: NDArray[np.int32]  # [S]
    is_cut: bool = False
    """Whether it reached its most tokens, and so may have ended in the middle of a sentence."""

    def up_to(self, count: int) -> Turn:
        """Its first `count` tokens."""
        is_cut = self.is_cut and count >= len(self.token_ids)
        return Turn(self.token_ids[:count], self.logprobs[:count], self.versions[:count], is_cut)


def turn_of(completion: Any, version: int) -> Turn:
    """From vLLM's CompletionOutput with flat logprobs. Its spans hold the weights of its tokens; tokens of no span are
    of the loaded `version`. vLLM's initial label is a word: version -1."""
    token_ids = list(completion.token_ids)
    versions = np.full(len(token_ids), version, dtype=np.int32)
    for span in completion.weight_versions or ():
        versions[span.start : span.end] = int(span.version) if span.version.lstrip("-").isdigit() else -1
    logprobs = np.asarray(completion.logprobs.logprobs, dtype=np.float32)
    return Turn(token_ids, logprobs, versions, is_cut=completion.finish_reason == "length")
