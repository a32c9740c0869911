"""A custom objective: CISPO, whose ratio is a bounded weight and no gradient flows through it.

    [loss]
    objective = "docs.examples.objectives:cispo"

Source: MiniMax-M1 (2025), Eq. 4.
"""

from __future__ import annotations

import torch

from cusearch_async.algorithm.losses import Surrogate


def cispo(ratio: torch.Tensor, advantages: torch.Tensor, settings: Surrogate) -> torch.Tensor:
    """sg(min(r, 1 + ε_high)) A log π_θ [T], up to what does not depend on θ: log π_θ has the gradient of log r."""
    weight = torch.clamp(ratio, max=1 + settings.clip_high).detach()
    return weight * advantages * torch.log(ratio)
