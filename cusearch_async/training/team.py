"""The learner's ranks. Rank 0 alone talks to Redis and tells the others what to do.

It tells them through the process group's key-value store, where the others poll, and not inside a collective:
a collective that waits longer than the group's timeout for trajectories would kill the run.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported, but not declared

_POLL_S = 0.01
_MESSAGES_KEPT = 4
_LONGEST = 512


class Team:
    """Rank and size from RANK and WORLD_SIZE (as torchrun sets them); one rank without them."""

    def __init__(self) -> None:
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed insists on it
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        port = int(os.environ.get("MASTER_PORT", "0"))
        self._store = TCPStore(host, port, self.size, is_master=self.rank == 0, timeout=timedelta(minutes=10))
        self._count = 0
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        group_store = PrefixStore("group", self._store)
        dist.init_process_group(backend, store=group_store, rank=self.rank, world_size=self.size)
        self._cpu_group = dist.new_group(backend="gloo")

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def tell(self, message: bytes) -> None:
        """Rank 0: send a message to every other rank; returns at once."""
        if self.size == 1:
            return
        self._store.set(f"message/{self._count}", message)  # type: ignore[arg-type]  # bytes are fine
        if self._count >= _MESSAGES_KEPT:
            self._store.delete_key(f"message/{self._count - _MESSAGES_KEPT}")
        self._count += 1

    def listen(self) -> bytes:
        """Other ranks: wait for the next message, however long that takes."""
        key = f"message/{self._count}"
        while not self._store.check([key]):
            time.sleep(_POLL_S)
        self._count += 1
        return bytes(self._store.get(key))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of a CPU tensor over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values, group=self._cpu_group)
        return values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Maximum of a CPU tensor over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._cpu_group)
        return values

    def gather(self, text: str) -> list[str]:
        """What every rank says, in the order of ranks, cut to `_LONGEST` bytes each."""
        rows = torch.zeros(self.size, _LONGEST, dtype=torch.uint8)
        said = text.encode()[:_LONGEST]
        rows[self.rank, : len(said)] = torch.tensor(list(said), dtype=torch.uint8)
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in self.sum(rows)]

    def close(self) -> None:
        dist.destroy_process_group()
