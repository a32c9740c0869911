"""The policy as the learner sees it: log-probabilities of the sampled tokens, and nothing else."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import CONFIG_NAME

from cusearch_async.errors import ConfigError, first_line
from cusearch_async.learner import matmul
from cusearch_async.learner.attention import VARLEN, refuse_unsuitable
from cusearch_async.learner.batching import Packed
from cusearch_async.models import ids_of, read_config, refuse_more_layers, refuse_other_weights, why_not_saved

log = logging.getLogger(__name__)


def load_causal_lm(path: str, dtype: str, attention: str = "sdpa") -> Any:
    """A model with all of its weights, and a generation config that can be saved.

    Raises: ConfigError naming the model and what is wrong."""
    read_config(path)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=getattr(torch, dtype),
            attn_implementation=attention,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused here, with both shapes
        )
    except ImportError as error:
        raise ConfigError(f"learner.attention {attention!r} cannot be used: {first_line(error)}") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"model.path {path!r} cannot be loaded: {first_line(error)}") from error
    vars(model.config).pop("auto_map", None)  # it names code that is not used, and so not saved
    refuse_other_weights(report, path)
    if attention == VARLEN:
        refuse_unsuitable(model, path)
    reason = why_not_saved(model.generation_config)
    if reason is not None:
        log.warning("generation_config of %s: only its token ids are saved with checkpoints: %s", path, reason)
        model.generation_config = ids_of(model.generation_config)
    return model


BLOCKS = 32
"""Of a piece of logits, made float32 one after the other: on a CPU they stay in its caches, and with a vocabulary of
49,000 the head takes 0.55 of the time."""
SMALL = 2**18
"""Logits of a block that is not made smaller."""


class Head(nn.Linear):
    """The LM head for all sampled tokens of a forward pass in one call, their logits in pieces.

    One call, because ZeRO-3 gathers the weight at each call, on all ranks together: ranks whose trajectories make
    different numbers of pieces would wait for each other without end."""

    logits_chunk_tokens: int
    entropy_has_gradient: bool
    products: matmul.Products

    @classmethod
    def in_place_of(cls, head: nn.Linear, logits_chunk_tokens: int, entropy_has_gradient: bool) -> Head:
        """A head with the very parameters of `head`, tied ones included."""
        with torch.device("meta"):
            own = cls(head.in_features, head.out_features, bias=head.bias is not None)
        own.weight, own.bias = head.weight, head.bias
        own.logits_chunk_tokens, own.entropy_has_gradient = logits_chunk_tokens, entropy_has_gradient
        own.products = matmul.products_of(head)
        return own

    def forward(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor | None = None,
        temperature: float = 1.0,
        wants_entropy: bool = True,
    ) -> Any:
        """Logits; with `targets` [S], the log-probability and the entropy [S], float32, of these tokens. Entropies that
        are not wanted are 0."""
        if targets is None:
            return super().forward(hidden)
        arguments = (hidden, self.weight, self.bias, targets, temperature, self.logits_chunk_tokens, self.products)
        return SoftmaxInPieces.apply(*arguments, wants_entropy, self.entropy_has_gradient)  # type: ignore[no-untyped-call]


class SoftmaxInPieces(torch.autograd.Function):
    """Log-probability of the targets and entropy of softmax(W h / temperature), both float32 [S].

    Only the logits of `chunk` tokens are held at a time, in the model's dtype, and what is made of them in float32, at
    most two tensors, of a few rows each. The backward pass, which knows each token's weight, begins with the last
    `chunk` tokens, whose logits the forward pass leaves there, and computes those of the others again from the inputs
    and two numbers per token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk: int,
        products: matmul.Products,
        wants_entropy: bool,
        entropy_has_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, entropy, normalizer = (hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(3))
        of_piece = None
        for piece in _pieces(len(hidden), chunk):
            del of_piece  # the next piece is made when this one is gone
            of_piece = products.linear(hidden[piece], weight, bias)
            for rows, logits in _blocks(piece, chunk, of_piece):
                scaled = _scaled(logits, temperature)
                chosen[rows], entropy[rows], normalizer[rows] = _softmax(scaled, targets[rows], wants_entropy)
            del logits, scaled
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy if entropy_has_gradient else None)
        ctx.temperature, ctx.chunk, ctx.products, ctx.of_last_piece = temperature, chunk, products, of_piece
        if not entropy_has_gradient:
            ctx.mark_non_differentiable(entropy)
        return chosen, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_chosen: torch.Tensor, of_entropy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        of_weight = torch.zeros_like(weight) if needs_weight else None
        of_bias = torch.zeros_like(bias) if needs_bias else None
        of_chosen, of_entropy = of_chosen / ctx.temperature, of_entropy / ctx.temperature
        of_logits, ctx.of_last_piece = ctx.of_last_piece, None  # overwritten by their slopes, so for one backward pass
        for piece in reversed(_pieces(len(hidden), ctx.chunk)):
            if of_logits is None:
                of_logits = ctx.products.linear(hidden[piece], weight, bias)
            for rows, logits in _blocks(piece, ctx.chunk, of_logits):
                log_p = _scaled(logits, ctx.temperature)
                log_p -= normalizer[rows, None]
                logits.copy_(
                    _slope(log_p, targets[rows], of_chosen[rows])
                    if entropy is None
                    else _slope_with_entropy(log_p, targets[rows], of_chosen[rows], entropy[rows], of_entropy[rows])
                )
            if of_hidden is not None:
                of_hidden[piece] = ctx.products.product(of_logits, weight)
            if of_weight is not None:
                ctx.products.add_outer(of_weight, of_logits, hidden[piece])
            if of_bias is not None:
                of_bias += of_logits.sum(0)
            del logits, log_p
            of_logits = None
        return of_hidden, of_weight, of_bias, None, None, None, None, None, None


def _pieces(count: int, chunk: int) -> list[slice]:
    """The last one is a whole chunk, if there are as many."""
    ends = range(count, 0, -chunk)
    return [slice(max(0, end - chunk), end) for end in reversed(ends)]


def _blocks(piece: slice, chunk: int, logits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """The rows of `logits`, those of `piece`, few at a time: where they stand, and the very ones."""
    for rows in _pieces(len(logits), max(1, chunk // BLOCKS, SMALL // logits.shape[1])):
        own = logits[rows]
        yield slice(piece.start + rows.start, piece.start + rows.start + len(own)), own


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """A copy in float32."""
    scaled = logits.to(torch.float32, copy=True)
    if temperature != 1:
        scaled /= temperature
    return scaled


def _softmax(
    logits: torch.Tensor, targets: torch.Tensor, wants_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | float, torch.Tensor]:
    """Log-probability of the targets, entropy (0 if it is not wanted) and logarithm of the normalizer; overwrites the
    `logits`."""
    largest = logits.amax(-1, keepdim=True)
    logits -= largest
    of_targets = logits.gather(-1, targets[:, None]).squeeze(-1)
    exponentials = logits.exp() if wants_entropy else logits.exp_()
    total = exponentials.sum(-1)
    log_total = total.log()
    entropy: torch.Tensor | float = 0.0
    if wants_entropy:
        exponentials *= logits
        entropy = log_total - exponentials.sum(-1) / total  # log Σ e^z - Σ e^z z / Σ e^z
    return of_targets - log_total, entropy, largest.squeeze(-1) + log_total


def _slope(log_p: torch.Tensor, targets: torch.Tensor, of_chosen: torch.Tensor) -> torch.Tensor:
    """The gradient of the scaled logits z: ∂ log p_t / ∂z = 1_t - p. `log_p` are overwritten."""
    slope = log_p.exp_()
    slope *= -of_chosen[:, None]
    return slope.scatter_add_(-1, targets[:, None], of_chosen[:, None])


def _slope_with_entropy(
    log_p: torch.Tensor, targets: torch.Tensor, of_chosen: torch.Tensor, entropy: torch.Tensor, of_entropy: torch.Tensor
) -> torch.Tensor:
    """As `_slope`, and ∂H / ∂z = -p (log p + H)."""
    slope = log_p.exp()
    log_p += entropy[:, None]
    log_p *= -of_entropy[:, None]
    log_p -= of_chosen[:, None]
    slope *= log_p
    return slope.scatter_add_(-1, targets[:, None], of_chosen[:, None])


class SampledLogprobs(nn.Module):
    """Wraps a causal language model; the module that DeepSpeed trains.

    Only positions that predict a sampled token go through the LM head."""

    def __init__(self, model: Any, logits_chunk_tokens: int, entropy_has_gradient: bool = False) -> None:
        """`entropy_has_gradient` is for an entropy bonus."""
        super().__init__()
        self.model = model
        head = Head.in_place_of(model.get_output_embeddings(), logits_chunk_tokens, entropy_has_gradient)
        model.set_output_embeddings(head)

    def forward(
        self,
        token_ids: torch.Tensor,
        sampled: torch.Tensor,
        temperature: float,
        packed: Packed | None = None,
        wants_entropy: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy [S], float32, of every sampled token. `sampled` [S] are the places of these
        tokens in the flattened `token_ids`.

        `token_ids` [B, L] are padded on the right, or one row of `packed` trajectories, each of which sees itself only.
        The first token of a trajectory is never a sampled one. Both results are of the distribution at `temperature`,
        from which was sampled. Entropies that are not wanted are 0."""
        layout: dict[str, Any] = {} if packed is None else {"position_ids": packed.positions}
        if packed is not None and self.model.config._attn_implementation == VARLEN:
            layout["packed"] = packed
        hidden = self.model.base_model(input_ids=token_ids, use_cache=False, **layout).last_hidden_state
        predicting = hidden.flatten(0, 1)[sampled - 1]
        targets = token_ids.flatten()[sampled]
        log_policy, entropy = self.model.get_output_embeddings()(predicting, targets, temperature, wants_entropy)
        return log_policy, entropy


Reference = Callable[[], AbstractContextManager[Callable[..., Any]]]
"""The forward pass of π_ref, the policy that the run starts from, inside the context only."""


def whole_reference(module: nn.Module, device: torch.device, waits_on_host: bool) -> Reference:
    """`module` on the device, or in the host's memory until it is used."""
    module.requires_grad_(False).eval()
    if waits_on_host:
        for buffer in module.buffers():
            buffer.data = buffer.data.to(device)
    else:
        module.to(device)
    pins = torch.cuda.is_available()  # page-locked memory, from which a GPU copies directly
    waiting = [(p, p.data.pin_memory() if pins else p.data) for p in module.parameters()] if waits_on_host else []

    @contextmanager
    def present() -> Iterator[nn.Module]:
        for parameter, on_host in waiting:
            parameter.data = on_host.to(device, non_blocking=True)
        try:
            yield module
        finally:
            for parameter, on_host in waiting:
                parameter.data = on_host

    return present


def layers_of(model: Any) -> list[Any]:
    """The layers that transformers knows as such, from below; empty for a model without them."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def train_upper_layers(model: Any, count: int, path: str) -> None:
    """Let only the `count` uppermost layers, and what follows them but the LM head, want a gradient. The backward pass
    then ends at the lowest of them.

    Raises: ConfigError when the model has not so many layers."""
    layers = layers_of(model)
    refuse_more_layers(count, len(layers), path)
    trained = {id(parameter) for layer in layers[len(layers) - count :] for parameter in layer.parameters()}
    is_above = False
    for parameter in model.parameters():  # in the order of the model
        is_above = is_above or id(parameter) in trained
        parameter.requires_grad_(is_above)
    for embedding in (model.get_input_embeddings(), model.get_output_embeddings()):
        embedding.requires_grad_(False)


def recompute_layers(model: Any) -> None:
    """Recompute activations inside the layers in the backward pass (gradient checkpointing).

    transformers does so for a layer in training mode only. All else stays in evaluation mode, the layers too while they
    compute: dropout would make another policy than that of π_prox and the engines."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers_of(model):
        layer.training = True
        layer.register_forward_pre_hook(partial(_set_training, False))
        layer.register_forward_hook(partial(_set_training, True), always_call=True)


def _set_training(is_training: bool, module: torch.nn.Module, *_: Any) -> None:
    module.training = is_training


def compile_layers(model: Any, path: str) -> None:
    """Have torch compile the model's layers at their first passes, once for batches of any shape.

    Raises: ConfigError when the model has no layers that are compiled separately, or there is no C++ compiler."""
    # these imports take two seconds
    from torch._inductor import config as inductor  # noqa: PLC0415
    from torch._inductor.cpp_builder import get_cpp_compiler  # noqa: PLC0415
    from torch._inductor.exc import InvalidCxxCompiler  # noqa: PLC0415

    layers = layers_of(model)
    if not layers:
        raise ConfigError(f"model.path {path!r} has no layers that transformers knows as such; unset learner.compile")
    if not torch.cuda.is_available():
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise ConfigError(
                "learner.compile needs a C++ compiler on a CPU (g++, or one that CXX names); install one, or unset it"
            ) from error
    inductor.compile_threads = 1  # in this process: no others that would have to end with it
    for layer in layers:
        layer.compile(dynamic=True)


def saved_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a model's files: its parameters, tied ones once, and those of its buffers that are not computed
    from its config, such as the routing biases of some mixtures of experts."""
    yield from model.named_parameters()
    for place, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{place}.{name}" if place else name, buffer


def tied_names(model: Any) -> dict[str, str]:
    """Each further name of a parameter -> the one that `saved_tensors` has it by."""
    first: dict[int, str] = {}
    return {
        name: first[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first.setdefault(id(parameter), name) != name
    }


def as_in_files(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`tensors` of a model by the names that its files have: transformers holds the experts of a layer in one tensor,
    files and vLLM hold them one by one."""
    return dict(revert_weight_conversion(model, dict(tensors)))


def save_model(model: Any, tensors: dict[str, torch.Tensor], tokenizer: Any, folder: Path) -> None:
    """Write the policy as a Hugging Face folder, with the names that tools with an older transformers read."""
    model.save_pretrained(folder, state_dict=tensors)
    tokenizer.save_pretrained(folder)
    path = folder / CONFIG_NAME
    if not path.exists():  # only the first rank writes it
        return
    known = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(known | _older_names(known), indent=2) + "\n", encoding="utf-8")


def _older_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers 4 reads in place of `rope_parameters` and `dtype`: without them it takes 10,000 as the base of
    the rotary positions, without a word."""
    older = {"torch_dtype": config["dtype"]} if config.get("dtype") else {}
    rope = config.get("rope_parameters") or {}
    if sliding := rope.get("sliding_attention"):
        older["rope_local_base_freq"] = sliding["rope_theta"]
    rope = rope.get("full_attention", rope)
    parts = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    scaling = {name: value for name, value in rope.items() if name not in parts}
    if config["model_type"] == "phi3":  # which takes these three and no others
        scaling = {"type": rope.get("rope_type")} | {name: rope.get(name) for name in ("short_factor", "long_factor")}
    is_plain = rope.get("rope_type", "default") == "default"
    return {**older, **parts, "rope_scaling": None if is_plain else scaling}


def try_to_save(model: Any, tokenizer: Any, path: str) -> None:
    """Save all of a model but its weights, to nowhere: a refusal at the first checkpoint would cost the work up to it.
    Raises: ConfigError."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            save_model(model, {}, tokenizer, Path(folder))
        except Exception as error:  # whatever it is, it would come again with each checkpoint
            raise ConfigError(f"model.path {path!r} could not be saved in a checkpoint: {first_line(error)}") from error
