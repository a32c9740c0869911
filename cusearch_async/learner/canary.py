"""The text whose log-probabilities a worker compares with the learner's, to check that its engine has the weights."""

from __future__ import annotations

from typing import Any

CANARY_TEXT = (
    "The river rises in the hills north of the town, turns east at the old stone bridge, and reaches the sea after "
    "two hundred miles. In spring, when the snow melts, it floods the meadows on both of its banks."
)


def canary_ids(tokenizer: Any, max_tokens: int) -> list[int]:
    """The text's token ids, as many as an engine with room for `max_tokens` scores."""
    ids: list[int] = tokenizer(CANARY_TEXT, add_special_tokens=False)["input_ids"]
    return ids[: max_tokens - 1]


def canary_tolerance(dtype: str, device: str) -> float:
    """Largest mean absolute difference of log-probabilities between a learner on a `device` ("cpu", "cuda") and an
    engine with the same weights.

    bfloat16 makes 0.05 of the starters'. In float32 on a GPU vLLM's attention (Triton's) multiplies in TF32: 0.002 to
    0.005 where that is emulated. One optimizer step of the demo makes 0.09."""
    if dtype == "bfloat16":
        return 0.1
    return 1e-3 if device == "cpu" else 1e-2
