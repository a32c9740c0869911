"""Extends vLLM's worker: new weights are prepared while the model decodes, and taken in a pause. vLLM imports it.

On a CPU vLLM packs the weights of each linear layer for its kernels, which takes several times as long as copying them.
There vLLM's loader fills a shadow of the model, the same layers with separate tensors, which the model takes over in
the pause. Elsewhere (a GPU has no room for a second model; layers of experts keep more than is known here) the file is
read into the host's memory, page-locked for a GPU, and in the pause vLLM loads from there.
"""

from __future__ import annotations

import copy
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from safetensors import safe_open
from torch import set_num_threads  # vLLM's worker puts one that does nothing in its place
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

LOADER = ThreadPoolExecutor(1, "staging", initializer=set_num_threads, initargs=(1,))  # the other cores decode

ALIGNED = 64
"""Bytes: where tensors of any dtype may begin."""

HostTensors = dict[str, torch.Tensor]
"""A file's tensors by name, in the host's memory."""


class StagesWeights:
    """Methods of vLLM's worker, for `collective_rpc`."""

    device: torch.device
    model_runner: Any
    reload_weights: Any
    staged: Future[torch.nn.Module | HostTensors]

    def stage_weights(self, file: str) -> None:
        """Begin to read a safetensors file of the whole model."""
        runner = self.model_runner
        if self.device.type == "cpu" and can_have_shadow(runner.get_model()):
            self.staged = LOADER.submit(loaded_shadow, runner.get_model(), runner.model_config, file)
        else:
            self.staged = LOADER.submit(read_tensors, file, self.device)

    def is_staged(self) -> bool | str:
        """What reading has failed with, in words: the model has not changed. If it raised, vLLM would leave the other
        ranks' answers where it looks for those of its next call."""
        if not self.staged.done():
            return False
        error = self.staged.exception()
        return True if error is None else f"{type(error).__name__}: {error}"

    def take_staged(self) -> None:
        """The model has the new weights from now on."""
        model, staged = self.model_runner.get_model(), self.staged.result()
        del self.staged
        if isinstance(staged, torch.nn.Module):
            take_over(model, staged)
        else:
            forget_kernels(model)
            self.reload_weights(weights_iterator=iter(staged.items()))


def can_have_shadow(model: torch.nn.Module) -> bool:
    """False for a model with other packed layers than linear ones, such as experts."""
    methods = {type(getattr(layer, "quant_method", None)) for layer in model.modules()}
    return methods <= {NoneType, UnquantizedLinearMethod, UnquantizedEmbeddingMethod}


def read_tensors(file: str, device: torch.device) -> HostTensors:
    """In one block, which torch keeps for the next file: it rounds each page-locked one up to a power of two, which
    takes up to twice the file where every tensor has its own.

    Raises: OSError; MemoryError when the host cannot lock so much memory."""
    read: HostTensors = {}
    with safe_open(file, framework="pt") as tensors:
        names, place = list(tensors.keys()), 0
        block = _block(Path(file).stat().st_size + ALIGNED * len(names), device)
        for name in names:
            tensor = tensors.get_tensor(name)
            read[name] = block[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            place += -(-tensor.nbytes // ALIGNED) * ALIGNED
    return read


def _block(size: int, device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return torch.empty(size, dtype=torch.uint8)
    try:
        with torch.cuda.device(device):  # of this thread: else the first GPU gets a context of this process
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:  # torch.AcceleratorError is one
        raise MemoryError(f"the host cannot lock {size / 2**30:.1f} GiB of its memory: {error}") from error


def forget_kernels(model: torch.nn.Module) -> None:
    """vLLM packs the weights of experts only when it makes their kernel: later ones would stay unpacked, and be read as
    packed. Without a kernel, vLLM makes a new one."""
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
    """The layer with separate tensors, and separate notes of what vLLM's loader has to restore."""
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
    """Move the packed weights, and copy all others into the model's, tied ones once. The shadow is empty then."""
    copied = set()
    for layer, twin in zip(model.modules(), shadow.modules(), strict=True):
        if "cpu_linear" in vars(layer):
            layer.cpu_linear = twin.cpu_linear
        for name, tensor in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
            if tensor.data_ptr() not in copied:
                tensor.data.copy_(getattr(twin, name))
                copied.add(tensor.data_ptr())
    for twin in list(shadow.modules()):
        get_layerwise_info(twin).restore_metadata = ({}, {})  # its loaders hold the layer, which would stay for ever
        vars(twin).clear()  # its layers and their loaders hold each other: memory would wait for gc
