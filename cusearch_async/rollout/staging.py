"""Extends vLLM's worker: on a CPU new weights are made ready beside the model, which goes on decoding.

There vLLM packs the weights of each linear layer for its kernels. That takes several times as long as copying them, and
vLLM's own `reload_weights` does it while the engine is paused. Here vLLM's loader fills a shadow of the model, the same
layers with tensors of their own, in a thread; in the pause the model takes over what the shadow has. Until then the
memory holds both. vLLM imports this module, in the engine's process.
"""

from __future__ import annotations

import copy
from concurrent.futures import Future, ThreadPoolExecutor
from types import NoneType
from typing import Any

import torch
from safetensors import safe_open
from torch import set_num_threads  # vLLM's worker puts one that does nothing in its place
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

WeightTransferEngineFactory.register_engine("gloo", "cusearch_async.rollout.gloo_transfer", "GlooTransferEngine")

LOADER = ThreadPoolExecutor(1, "staging", initializer=set_num_threads, initargs=(1,))  # the other cores decode


class StagesWeights:
    """Methods of vLLM's worker, for `collective_rpc`."""

    model_runner: Any
    staged: Future[torch.nn.Module]

    def stage_weights(self, file: str) -> bool:
        """Begin to load a safetensors file of the whole model. False, and nothing is begun, for a model with other
        packed layers than linear ones, such as experts: what those keep is not known here."""
        runner = self.model_runner
        methods = {type(getattr(layer, "quant_method", None)) for layer in runner.get_model().modules()}
        if not methods <= {NoneType, UnquantizedLinearMethod, UnquantizedEmbeddingMethod}:
            return False
        self.staged = LOADER.submit(loaded_shadow, runner.get_model(), runner.model_config, file)
        return True

    def is_staged(self) -> bool:
        """Raises: what loading has failed with. The model has not changed."""
        if not self.staged.done():
            return False
        self.staged.result()
        return True

    def forget_kernels(self) -> None:
        """Before vLLM's own `reload_weights`, in its pause: the model cannot be used in between."""
        forget_kernels(self.model_runner.get_model())

    def take_staged(self) -> None:
        """The model has the new weights from now on."""
        take_over(self.model_runner.get_model(), self.staged.result())
        del self.staged


def forget_kernels(model: torch.nn.Module) -> None:
    """vLLM packs the weights of experts when it makes their kernel, which it does only once: other weights would stay
    unpacked, and be read as packed ones. With the next weights it makes a new one."""
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


@torch.no_grad()
def loaded_shadow(model: torch.nn.Module, model_config: Any, file: str) -> Any:
    """A shadow with the weights of a file, as vLLM's loader lays them out for this model. Raises: OSError."""
    shadow: Any = shadow_of(model)
    initialize_layerwise_reload(shadow)
    with safe_open(file, framework="pt") as tensors:
        shadow.load_weights((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118
    finalize_layerwise_reload(shadow, model_config)
    return shadow


def shadow_of(model: torch.nn.Module) -> torch.nn.Module:
    twins = {layer: twin_of(layer) for layer in model.modules()}  # each layer once, however many have it
    for twin in twins.values():
        twin._modules = {name: child if child is None else twins[child] for name, child in twin._modules.items()}
    return twins[model]


def twin_of(layer: torch.nn.Module) -> torch.nn.Module:
    """A layer with tensors of its own, and with its own notes of what vLLM's loader has to restore."""
    twin = copy.copy(layer)
    twin._parameters = {name: tensor if tensor is None else own(tensor) for name, tensor in layer._parameters.items()}
    twin._buffers = {name: tensor if tensor is None else own(tensor) for name, tensor in layer._buffers.items()}
    twin._non_persistent_buffers_set = set(layer._non_persistent_buffers_set)
    known, notes = get_layerwise_info(layer), get_layerwise_info(twin)
    parameters, buffers = ({name: own(tensor) for name, tensor in part.items()} for part in known.restore_metadata)
    notes.restore_metadata, notes.restore_device = (parameters, buffers), known.restore_device
    return twin


def own(tensor: torch.Tensor) -> Any:
    """A tensor of the same class and attributes, vLLM's weight loader among them."""
    twin: Any = tensor.data.clone()
    twin.__class__ = tensor.__class__
    twin.__dict__ = tensor.__dict__.copy()
    return twin


@torch.no_grad()
def take_over(model: torch.nn.Module, shadow: torch.nn.Module) -> None:
    """Packed weights change hands. All others are copied to where the model has them, tied ones once. The shadow is
    empty then."""
    copied = set()
    for layer, twin in zip(model.modules(), shadow.modules(), strict=True):
        if "cpu_linear" in vars(layer):
            layer.cpu_linear = twin.cpu_linear
        for name, tensor in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
            if tensor.data_ptr() not in copied:
                tensor.data.copy_(getattr(twin, name))
                copied.add(tensor.data_ptr())
    for twin in list(shadow.modules()):  # its layers and their loaders hold each other: memory would wait for gc
        vars(twin).clear()
