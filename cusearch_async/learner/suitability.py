"""Whether the learner computes a model's log-probabilities: checked of every model before it is trained.

The learner applies the LM head itself, to the sampled tokens only, and may pack several trajectories into one row. A
model that scales or caps its logits, or carries a state from token to token, would silently be trained on other
log-probabilities than it samples with."""

from __future__ import annotations

import torch

from cusearch_async.errors import ConfigError
from cusearch_async.learner.batching import pack
from cusearch_async.learner.model import SampledLogprobs
from cusearch_async.learner.ranks import Ranks
from cusearch_async.run.provenance import weights_of

_TOKENS = 8
"""Of each of the sequences that are tried."""
_APART = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Nats by which log-probabilities may differ: the last bit of a logit of 16 to 32 is 0.1 in bfloat16."""
_SEEN = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""The same where all shapes are equal."""


_KEEP_POSITIONS = ("ministral3", "mistral4")
"""Kinds of models whose attention layers in transformers do not give the positions to the kernel."""


@torch.no_grad()
def refuse_unsuitable_policy(policy: SampledLogprobs, path: str, packing: bool) -> None:
    """Raises: ConfigError with what differs, for a model whose log-probabilities the learner would not compute."""
    model = policy.model
    attention = model.config._attn_implementation
    is_flash = attention.startswith("flash")  # whose kernels are none of the CPU's, where the model is still
    if is_flash and packing and model.config.model_type in _KEEP_POSITIONS:
        raise ConfigError(
            f"learner.packing cannot be used with model.path {path!r} and learner.attention {attention!r}: the "
            f"attention of a {model.config.model_type} would not know where trajectories begin; set learner.attention "
            "to 'sdpa'"
        )
    if is_flash:
        model.set_attn_implementation("sdpa")
    words = model.get_output_embeddings().out_features
    sequences = torch.randint(words, (3, 1, _TOKENS), generator=torch.Generator().manual_seed(0))
    first, other, second = sequences.to(model.device)
    apart = _apart_from_its_own(policy, first)
    seen = _seen_of_the_first(policy, first, other, second) if packing else 0.0
    if is_flash:
        model.set_attn_implementation(attention)
    if apart > _APART[model.dtype]:
        raise ConfigError(
            f"model.path {path!r} cannot be trained: log-probabilities of its own forward pass differ by {apart:.2g} "
            "from those of its last hidden states and LM head, so it scales or caps them in between, as Granite, "
            "Cohere and Gemma 2 do; use a model that does not, such as Qwen or Llama"
        )
    if seen > _SEEN[model.dtype]:
        raise ConfigError(
            f"learner.packing cannot be used with model.path {path!r}: a trajectory sees the one before it in the row "
            f"(its log-probabilities change by {seen:.2g}); set learner.packing to false"
        )


def _apart_from_its_own(policy: SampledLogprobs, token_ids: torch.Tensor) -> float:
    sampled = torch.arange(1, _TOKENS, device=token_ids.device)
    found, _ = policy(token_ids, sampled, 1.0, wants_entropy=False)
    log_p = policy.model(input_ids=token_ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return float((log_p.gather(-1, token_ids[0, 1:, None]).squeeze(-1) - found).abs().max())


def _seen_of_the_first(policy: SampledLogprobs, *sequences: torch.Tensor) -> float:
    """By how much a sequence changes with the one before it in its row."""
    first, other, second = sequences
    of_second = torch.arange(_TOKENS + 1, 2 * _TOKENS, device=second.device)
    packed = pack([_TOKENS, _TOKENS]).to(second.device)
    one, another = (
        policy(torch.cat([before, second], dim=1), of_second, 1.0, packed, wants_entropy=False)[0]
        for before in (first, other)
    )
    return float((one - another).abs().max())


def refuse_other_models(ranks: Ranks, location: str) -> None:
    """DeepSpeed gives all ranks the policy of rank 0, and not the reference: another revision in a node's cache would
    be one. All ranks wait here for those that load slowly: the group with which DeepSpeed starts has another time-out.

    Raises: ConfigError on all ranks."""
    found = ranks.gather(weights_of(location))
    others = [str(rank) for rank, one in enumerate(found) if one != found[0] and one and found[0]]
    if others:
        raise ConfigError(
            f"model.path {location} has other weights on rank {', '.join(others)} than on rank 0: {found[0]!r} and "
            f"{found[int(others[0])]!r}; give all nodes the same files"
        )
