"""The learner's ranks. Only rank 0 talks to Redis; it sends commands to the other ranks.

The commands go through a key-value store that the other ranks poll, not through a collective: a collective that waits
for trajectories longer than the group's timeout would end the run.

The store has no password. It listens at MASTER_ADDR only. The names of messages cannot be guessed without
CUSEARCH_RANKS_SECRET, and messages without its signature are ignored. Not covered: a process that reaches the store can
delete messages, and so block the ranks; and collectives are not signed.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # not declared

from cusearch_async.errors import ConfigError

log = logging.getLogger(__name__)

SECRET = "CUSEARCH_RANKS_SECRET"  # noqa: S105  (the variable's name)
_POLL_S = 0.01
_REPORT_S = 1.0
_MESSAGES_KEPT = 4
_LONGEST = 512
_SIGNED = 32


class Ranks:
    """This process among the learner's ranks: `rank` and `size` from RANK and WORLD_SIZE (as torchrun sets them); one
    rank without them.

    Raises: ConfigError when rank 0 cannot listen at MASTER_ADDR and MASTER_PORT."""

    def __init__(self) -> None:
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed insists on it
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self._secret = os.environ.get(SECRET, "").encode()
        if self.size > 1 and self.is_leader and not self._secret:
            log.warning("messages to the other ranks are not signed; set %s to one random text for all ranks", SECRET)
        store = _store(self.rank, self.size)
        # a connection of its own: the group's may be busy waiting for a rank
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._count = 0
        self._reports = 0
        self._heard: dict[int, tuple[bytes, float]] = {}
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        group_store = PrefixStore(self._name("group"), store)
        dist.init_process_group(backend, store=group_store, rank=self.rank, world_size=self.size)
        self._cpu_group = dist.new_group(backend="gloo")

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def tell(self, message: bytes) -> None:
        """Rank 0: send a message to every other rank; returns at once."""
        if self.size == 1:
            return
        signed = self._sign(self._count, message) + message
        self._store.set(self._name(f"message/{self._count}"), signed)  # type: ignore[arg-type]  # bytes are fine
        if self._count >= _MESSAGES_KEPT:
            self._store.delete_key(self._name(f"message/{self._count - _MESSAGES_KEPT}"))
        self._count += 1

    def listen(self) -> bytes:
        """Other ranks: wait for the next message of rank 0, however long that takes; a message that another process put
        there is ignored."""
        reported = -_REPORT_S
        while True:
            if time.monotonic() - reported >= _REPORT_S:
                self._report()
                reported = time.monotonic()
            said = self._read(f"message/{self._count}")
            if hmac.compare_digest(said[:_SIGNED], self._sign(self._count, said[_SIGNED:])):
                self._count += 1
                return said[_SIGNED:]
            time.sleep(_POLL_S)

    def silent(self, after_s: float) -> list[int]:
        """Rank 0, from any thread: the ranks that have not asked for a message for `after_s` seconds, as far as calls
        of this can tell. A rank asks every second while it waits, and when it has done what it was told; those that
        wait for a silent one inside a collective are silent too."""
        now = time.monotonic()
        for rank in range(1, self.size):
            said = self._read(f"report/{rank}")
            if rank not in self._heard or self._heard[rank][0] != said:
                self._heard[rank] = said, now
        return [rank for rank, (_, since) in sorted(self._heard.items()) if now - since >= after_s]

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

    def _report(self) -> None:
        self._reports += 1
        self._store.set(self._name(f"report/{self.rank}"), str(self._reports))

    def _read(self, name: str) -> bytes:
        """What stands under a name; nothing where there is none."""
        key = self._name(name)
        return bytes(self._store.get(key)) if self._store.check([key]) else b""

    def _name(self, name: str) -> str:
        return hmac.new(self._secret, name.encode(), "sha256").hexdigest()

    def _sign(self, count: int, message: bytes) -> bytes:
        return hmac.digest(self._secret, b"%d:" % count + message, "sha256")


def _store(rank: int, size: int) -> Store:
    """Where the ranks meet: nothing that listens for one rank; else at MASTER_ADDR and MASTER_PORT, where rank 0
    listens, or torchrun itself."""
    if size == 1:
        return HashStore()
    host, port, timeout = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(minutes=10)
    if rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return TCPStore(host, port, size, is_master=False, timeout=timeout)
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        raise ConfigError(
            f"rank 0 cannot listen at MASTER_ADDR {host}, MASTER_PORT {port} ({error.strerror}); use an address of "
            "this machine and a free port"
        ) from error
    return TCPStore(  # it would listen on all interfaces by itself; the socket is the store's now
        host, port, size, is_master=True, timeout=timeout, master_listen_fd=listening.detach()
    )
