"""A weight-transfer engine for vLLM on a CPU, over gloo, with the calls of vLLM's own over NCCL.

vLLM imports this module, in the engine's process."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

from cusearch_async.rollout.staging import forget_kernels
from cusearch_async.transport.gloo import GlooGroup


@dataclass
class GlooInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not typed
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Of each tensor that is sent, in order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):  # type: ignore[misc]
    """The model changes in `finish_weight_update` only: a sender that is gone before leaves it as it was."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    _group: GlooGroup | None = None
    _received: tuple[tuple[str, torch.Tensor], ...] = ()

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        rank = init_info.rank_offset + self.parallel_config.rank
        self._group = GlooGroup(init_info.master_address, init_info.master_port, rank, init_info.world_size)

    def start_weight_update(self) -> None:
        self._received = ()

    def update_weights(self, update_info: dict[str, object]) -> None:
        """As vLLM's, which waits for a GPU afterwards."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Raises: RuntimeError when the sender is gone."""
        if self._group is None:
            raise RuntimeError("init_transfer_engine comes first")
        dtypes = [getattr(torch, name) for name in update_info.dtype_names]
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in zip(update_info.shapes, dtypes, strict=True)]
        for tensor in tensors:
            self._group.broadcast(tensor)
        self._received = tuple(zip(update_info.names, tensors, strict=True))

    def finish_weight_update(self) -> None:
        forget_kernels(self.model)
        initialize_layerwise_reload(self.model)
        self.model.load_weights(self._received)
        finalize_layerwise_reload(self.model, self.model_config)
        self._received = ()

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.destroy()
            self._group = None
