"""The learner's end of vLLM's weight transfer over NCCL. No other module of the learner imports vLLM."""

from __future__ import annotations

import os
import socket
import threading

import torch
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup

from cusearch_async.transport.gloo import MEET_S


class NcclGroup:
    """The learner as rank 0 among the ranks of an engine, as `NCCLWeightTransferEngine` of vLLM joins it. Blocks until
    all have come. Raises: RuntimeError, here and in `broadcast`, when one does not come, or after `destroy`. One that
    dies while it receives leaves a kernel waiting on this GPU until `destroy`."""

    def __init__(self, host: str, port: int, rank: int, size: int, listener: socket.socket) -> None:
        self._device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))  # where DeepSpeed has this rank's model
        torch.cuda.set_device(self._device)  # of this thread
        group = StatelessProcessGroup.create(host, port, rank, size, store_timeout=int(MEET_S), listen_socket=listener)
        self._communicator = PyNcclCommunicator(group, device=self._device)
        if self._communicator.disabled:
            raise RuntimeError("NCCL cannot be loaded, or is switched off (VLLM_DISABLE_PYNCCL)")
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._is_over = False

    def broadcast(self, tensor: torch.Tensor) -> None:
        """One after the other; a copy on the GPU lives as long as it is sent."""
        with torch.cuda.stream(self._stream):
            on_gpu = tensor.to(self._device)
            with self._lock:
                if self._is_over:
                    raise RuntimeError("the group has been destroyed")
                self._communicator.broadcast(on_gpu, src=0, stream=self._stream)
        self._stream.synchronize()

    def destroy(self) -> None:
        with self._lock:
            self._is_over = True
        self._communicator.destroy()
