"""The gradient of a trajectory's log-probability, projected to few numbers by random signs.

Inner products and cosines stay what they are, within 1/sqrt(DIMENSIONS) of the product of the lengths, so gradients of
thousands of trajectories can be kept and combined.
Source: Charikar, Chen and Farach-Colton, "Finding frequent items in data streams", 2002 (the count sketch)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from cusearch_async.config import Config
from cusearch_async.learner.model import SampledLogprobs, load_causal_lm, train_upper_layers
from cusearch_async.types import Trajectory

DIMENSIONS = 65_521
"""A prime, so that no two entries of a column of a weight matrix fall together regularly."""
_SEED = 0


class ProjectedGradients:
    """Of the policy in the folder `model`, and of the parameters that the config trains."""

    def __init__(self, model: str, config: Config) -> None:
        policy = load_causal_lm(model, config.model.dtype, config.learner.attention)
        if config.learner.trained_layers:
            train_upper_layers(policy, config.learner.trained_layers, model)
        self._module = SampledLogprobs(policy, config.learner.logits_chunk_tokens).eval()
        self._temperature = config.episode.temperature
        self._trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        generator = torch.Generator().manual_seed(_SEED)
        self._signs = [
            torch.randint(0, 2, (parameter.numel(),), generator=generator, dtype=parameter.dtype) * 2 - 1
            for parameter in self._trained
        ]

    def of(self, trajectory: Trajectory) -> Mapping[str, NDArray[np.float32]]:
        """Part -> [DIMENSIONS]: `all` sampled tokens, and `search`, those that an observation follows."""
        places = np.flatnonzero(trajectory.sampled)
        searching = int((places < np.flatnonzero(~trajectory.sampled)[-1]).sum())
        token_ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))[None]
        log_probs, _ = self._module(token_ids, torch.from_numpy(places), self._temperature, None, False)
        search = self._projected(log_probs[:searching]) if searching else torch.zeros(DIMENSIONS)
        rest = self._projected(log_probs[searching:]) if searching < len(places) else torch.zeros(DIMENSIONS)
        return {"all": (search + rest).numpy(), "search": search.numpy()}

    def _projected(self, log_probs: torch.Tensor) -> torch.Tensor:
        gradients = torch.autograd.grad(log_probs.sum(), self._trained, retain_graph=True, allow_unused=True)
        total, place = torch.zeros(DIMENSIONS), 0
        for gradient, signs in zip(gradients, self._signs, strict=True):
            if gradient is not None:
                signed = gradient.flatten() * signs
                rows, rest = signed[: len(signed) // DIMENSIONS * DIMENSIONS], len(signed) % DIMENSIONS
                sums = rows.view(-1, DIMENSIONS).sum(0, dtype=torch.float32)
                sums[:rest] += signed[len(rows) :]
                total += sums.roll(place)
            place = (place + len(signs)) % DIMENSIONS
        return total
