"""The gradients of trajectories' log-probabilities, projected to few numbers.

The gradient of a linear layer is a sum of products of its inputs and of the gradients of its outputs, one for each
token. So one pass over a batch gives those of all its trajectories: inputs and outputs are projected to fewer
dimensions before they are multiplied, and the products added up with random signs. Inner products and cosines stay what
they are, within a few hundredths.
Sources: Choe et al., "What is your data worth to GPT?", 2024 (the first projection); Charikar, Chen and Farach-Colton,
"Finding frequent items in data streams", 2002 (the second, the count sketch)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from cusearch_async.config import Config
from cusearch_async.learner.batching import collate, micro_batches
from cusearch_async.learner.model import SampledLogprobs, load_causal_lm, train_upper_layers
from cusearch_async.types import Row, Trajectory

DIMENSIONS = 65_521
"""A prime, so that no two entries of a column fall together regularly."""
MOST = 128
"""Dimensions of a layer's inputs and outputs that are multiplied; a smaller layer is not projected before."""
_SEED = 0

Passed = list[tuple[nn.Module, torch.Tensor, torch.Tensor]]
"""Layer, its input [B, L, I] and its output [B, L, O]."""


class ProjectedGradients:
    """Of the policy in the folder `model`, and of the linear layers that the config trains, but for the LM head."""

    def __init__(self, model: str, config: Config) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        policy = load_causal_lm(model, config.model.dtype, config.learner.attention)
        if config.learner.trained_layers:
            train_upper_layers(policy, config.learner.trained_layers, model)
        self._module = SampledLogprobs(policy, config.learner.logits_chunk_tokens).eval().to(self._device)
        self._temperature = config.episode.temperature
        self._batch_tokens = config.learner.micro_batch_tokens
        head = policy.get_output_embeddings()
        linear = (one for one in policy.modules() if isinstance(one, nn.Linear) and one is not head)
        self._layers = [layer for layer in linear if layer.weight.requires_grad]
        random = torch.Generator().manual_seed(_SEED)
        self._sides: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {
            layer: (
                _side(layer.in_features, layer.weight.dtype, random).to(self._device),
                _side(layer.out_features, layer.weight.dtype, random).to(self._device),
            )
            for layer in self._layers
        }
        products = sum(into.shape[1] * out.shape[1] for into, out in self._sides.values())
        signs = torch.randint(0, 2, (products + -products % DIMENSIONS,), generator=random) * 2.0 - 1
        self._signs = signs.to(self._device)

    def of(self, trajectories: Sequence[Trajectory]) -> Mapping[str, NDArray[np.float32]]:
        """Part -> [T, DIMENSIONS]: `all` sampled tokens, and `search`, those that an observation follows."""
        rows = [row for trajectory in trajectories for row in trajectory.rows]
        of_row = np.repeat(np.arange(len(trajectories)), [len(t.starts) for t in trajectories])
        is_last = np.append(of_row[1:] != of_row[:-1], True)
        search, rest = np.zeros((2, len(trajectories), DIMENSIONS), np.float32)
        for numbers in micro_batches([len(row.token_ids) for row in rows], self._batch_tokens, packing=False):
            for sums, part in zip(
                (search, rest), self._of_batch([rows[i] for i in numbers], is_last[numbers]), strict=True
            ):
                np.add.at(sums, of_row[numbers], part)
        return {"all": search + rest, "search": search}

    def _of_batch(self, batch: Sequence[Row], is_last: NDArray[np.bool_]) -> Iterator[NDArray[np.float32]]:
        """[B, DIMENSIONS] of the search tokens, and of the others. What follows the turn of a row that is not its
        trajectory's last stands in the next one."""
        inputs = collate(batch, packing=False).to(self._device)
        ends = [
            np.flatnonzero(~row.sampled)[-1] if last else len(row.sampled)
            for row, last in zip(batch, is_last, strict=True)
        ]
        searching = [np.flatnonzero(row.sampled) < end for row, end in zip(batch, ends, strict=True)]
        with self._watched() as passed:
            log_probs, _ = self._module(inputs.token_ids, inputs.sampled, self._temperature, None, False)
        is_search = torch.from_numpy(np.concatenate(searching)).to(self._device)
        for part in (is_search, ~is_search):
            outputs = [output for *_, output in passed]
            gradients = torch.autograd.grad(log_probs[part].sum(), outputs, retain_graph=True, allow_unused=True)
            yield self._projected(passed, gradients, len(batch))

    def _projected(self, passed: Passed, gradients: Sequence[torch.Tensor | None], rows: int) -> NDArray[np.float32]:
        products = []
        for (layer, entered, _), gradient in zip(passed, gradients, strict=True):
            into, out = self._sides[layer]
            if gradient is None:
                products.append(torch.zeros(rows, into.shape[1] * out.shape[1], device=self._device))
            else:
                products.append(
                    torch.einsum("bli,blo->bio", (entered @ into).float(), (gradient @ out).float()).flatten(1)
                )
        flat = torch.cat(products, dim=1)
        padded = nn.functional.pad(flat, (0, len(self._signs) - flat.shape[1])) * self._signs
        return padded.view(rows, -1, DIMENSIONS).sum(1).cpu().numpy()

    @contextmanager
    def _watched(self) -> Iterator[Passed]:
        """What passes through the layers, which is complete at the end."""
        passed: Passed = []

        def see(layer: nn.Module, entered: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            passed.append((layer, entered[0].detach(), output))

        hooks = [layer.register_forward_hook(see) for layer in self._layers]
        try:
            yield passed
        finally:
            for hook in hooks:
                hook.remove()


def _side(size: int, dtype: torch.dtype, random: torch.Generator) -> torch.Tensor:
    """[size, MOST] A random projection; the identity for fewer dimensions."""
    if size <= MOST:
        return torch.eye(size, dtype=dtype)
    drawn: torch.Tensor = torch.randn(size, MOST, generator=random) / MOST**0.5
    return drawn.to(dtype)
