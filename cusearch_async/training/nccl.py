"""The learner's end of vLLM's weight transfer over NCCL."""

from __future__ import annotations

import os
import socket

import torch


class NcclGroup:
    """The learner as rank 0 among the ranks of an engine, as `NCCLWeightTransferEngine` of vLLM joins it. Blocks until
    all have come. Raises: RuntimeError when one does not come. One that dies while it receives leaves a kernel waiting
    on this GPU until `destroy`."""

    def __init__(self, host: str, port: int, rank: int, size: int, listener: socket.socket) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator  # noqa: PLC0415  (takes seconds)
        from vllm.distributed.utils import StatelessProcessGroup  # noqa: PLC0415

        self._device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))  # where DeepSpeed has this rank's model
        torch.cuda.set_device(self._device)  # of this thread
        group = StatelessProcessGroup.create(host, port, rank, size, listen_socket=listener)
        self._communicator = PyNcclCommunicator(group, device=self._device)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def broadcast(self, tensor: torch.Tensor) -> None:
        """One after the other; a copy on the GPU lives as long as it is sent."""
        with torch.cuda.stream(self._stream):
            self._communicator.broadcast(tensor.to(self._device), src=0, stream=self._stream)
        self._stream.synchronize()

    def destroy(self) -> None:
        self._communicator.destroy()
