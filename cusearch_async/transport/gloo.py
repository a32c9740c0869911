"""Broadcasts on the CPU between processes that have no process group of torch's in common: the learner and the ranks of
one engine."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not declared
from torch.distributed.distributed_c10d import BroadcastOptions, ProcessGroupGloo

MEET_S = 15.0
"""For a group to meet: all of it is asked to at the same moment."""
TIMEOUT_S = 60.0
"""For one tensor: a peer that is silent for longer is gone."""


class GlooGroup:
    """Rank 0 sends what all others receive. It listens at `listener`; the others find it at `host` and `port`. Blocks
    until all have come. Raises: RuntimeError, here and in `broadcast`, when one does not come, or is gone."""

    def __init__(self, host: str, port: int, rank: int, size: int, listener: socket.socket | None = None) -> None:
        own = _own_address(host, port) if listener is None else listener.getsockname()[0]
        self._store: Any = TCPStore(
            host,
            port,
            size,
            is_master=listener is not None,
            timeout=timedelta(seconds=MEET_S),
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
        gloo: Any = ProcessGroupGloo  # its types are not all declared
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=own)]  # else it asks for the machine's own name
        options._timeout = timedelta(seconds=MEET_S)
        self._group: Any = gloo(self._store, rank, size, options)
        self._group.set_timeout(timedelta(seconds=TIMEOUT_S))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """From rank 0 into the tensors of the others, of the same size; one after the other."""
        group = self._group
        if group is None:
            raise RuntimeError("the group has been destroyed")
        options = BroadcastOptions()
        options.rootRank = 0
        group.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        """From any thread. The connections end with the last broadcast that is under way here, and with them those of
        the others; gloo has no way to end one sooner."""
        self._group = self._store = None


def _own_address(host: str, port: int) -> str:
    """The address by which this machine reaches another; nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
