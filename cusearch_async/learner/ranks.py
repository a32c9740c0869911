"""The learner's ranks. Only rank 0 talks to Redis; it sends commands to the other ranks through a key-value store that
they poll: a collective would time out while rank 0 waits for trajectories.

The store may outlive the ranks: torchrun restarts them (`--max-restarts`) on the same store, where their old messages
still are. So the ranks first agree on a name of their life, under which they then write everything.

The store has no password, and collectives are as open: several ranks need a private network.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from ipaddress import ip_address

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # not declared

from cusearch_async.errors import ConfigError, RanksFailed, first_line
from cusearch_async.lifecycle.launcher import ranks_here

log = logging.getLogger(__name__)

_POLL_S = 0.01
_REPORT_S = 1.0
_LEAVE_S = 30.0
"""How long rank 0 waits for the others at its end."""
_MESSAGES_KEPT = 8
"""More than rank 0 can send before it meets the others in a collective."""
_PIECE = 4 << 20
"""Bytes of a message in one value of the store, which takes at most 8 MiB."""
_LONGEST = 512
_ASK_S = 3.0
"""How long a rank whose collective failed waits for the others to report the same."""
_NAMING_S = 30.0
_FAILED = ("gloo", "Timed out waiting", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Texts in errors of collectives on gloo, which have no type."""


class Ranks:
    """This process among the learner's ranks: `rank` and `size` from RANK and WORLD_SIZE (as launchers set them); one
    rank without them.

    Raises: ConfigError when rank 0 cannot listen at MASTER_ADDR and MASTER_PORT; RanksFailed when the ranks do not meet
    within `timeout_s`, which is also the time-out of their collectives."""

    def __init__(self, timeout_s: float) -> None:
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed insists on it
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self._timeout_s = timeout_s
        store = _store(self.rank, self.size, timeout_s)
        # another connection: the group's may be busy waiting for a rank
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._life = ""
        self._life = self._agree()
        self._count = 0
        self._told: deque[list[str]] = deque()
        """Rank 0: the names that the newest messages have written."""
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._ended, self._asks = threading.Event(), False
        self._reporter = threading.Thread(target=self._report, name="rank", daemon=True)
        self._reporter.start()
        atexit.register(self._end_reports)  # a thread that is in the store when the interpreter ends would abort it
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        timeout = group_timeout(timeout_s)
        group_store = PrefixStore(self._name("group"), store)
        with self.meeting():
            dist.init_process_group(backend, store=group_store, rank=self.rank, world_size=self.size, timeout=timeout)
            self._cpu_group = dist.new_group(backend="gloo", timeout=timeout)

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def tell(self, message: bytes) -> None:
        """Rank 0: send a message to every other rank; returns at once."""
        if self.size == 1:
            return
        name = f"message/{self._count}"
        pieces = [message[start : start + _PIECE] for start in range(0, len(message), _PIECE)]
        for number, piece in enumerate(pieces):
            self._write(f"{name}/{number}", piece)
        self._write(name, b"%d" % len(pieces))  # whole from here on
        self._told.append([name, *(f"{name}/{number}" for number in range(len(pieces)))])
        if len(self._told) > _MESSAGES_KEPT:
            for part in self._told.popleft():
                self._store.delete_key(self._name(part))
        self._count += 1

    def listen(self) -> bytes:
        """Other ranks: wait for the next message of rank 0, however long that takes."""
        name = f"message/{self._count}"
        with self.meeting():
            message = b"".join(self._wait(f"{name}/{number}") for number in range(int(self._wait(name))))
        self._count += 1
        return message

    def _wait(self, name: str) -> bytes:
        """The value that a rank writes under a name, as soon as it is there."""
        while (value := self._read(name)) is None:
            time.sleep(_POLL_S)
        return value

    def go(self) -> None:
        """All ranks wait here for rank 0, however long that takes: in a collective they would wait no longer than its
        time-out."""
        if self.is_leader:
            self.tell(b"")
        else:
            self.listen()

    def answer(self, name: str, text: str) -> None:
        """Another rank than 0, from any thread: the text for which `wait_for_answers` of this name waits."""
        self._write(f"{name}/{self.rank}", text.encode())

    def wait_for_answers(self, name: str, within_s: float = math.inf) -> list[str]:
        """Rank 0, from any thread: the texts of all other ranks, in their order, as soon as all have answered; after
        `within_s` of those that have. Raises: RanksFailed, without `within_s`, for a rank that has not reported
        meanwhile for as long as a collective may take."""
        texts, deadline, looks_at = [], time.monotonic() + within_s, 0.0
        for rank in range(1, self.size):
            while (text := self._read(f"{name}/{rank}")) is None and (now := time.monotonic()) < deadline:
                if math.isinf(within_s) and now >= looks_at:
                    looks_at = now + _REPORT_S
                    if rank in self.silent(self._timeout_s):
                        why = f"has not reported for {self._timeout_s:g} s; see the log of that rank"
                        raise RanksFailed(f"rank {rank} {why}")
                time.sleep(_POLL_S)
            if text is not None:
                self._store.delete_key(self._name(f"{name}/{rank}"))
                texts.append(text.decode())
        return texts

    def silent(self, after_s: float) -> list[int]:
        """Rank 0, from any thread: the ranks that have not reported for `after_s` seconds, as far as calls of this can
        tell. A thread of each rank reports every second, also while the rank waits or works."""
        now = time.monotonic()
        for rank in range(1, self.size):
            report = self._read(f"report/{rank}") or b""
            if rank not in self._heard or self._heard[rank][0] != report:
                self._heard[rank] = report, now
        return [rank for rank, (_, since) in sorted(self._heard.items()) if now - since >= after_s]

    def ask_to_stop(self) -> None:
        """Another rank than 0, from a signal's handler: ask rank 0 to stop the run."""
        self._asks = True

    def is_asked_to_stop(self) -> bool:
        """Rank 0, from any thread: whether another rank has asked."""
        return self._read("asked") is not None

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Around everything that waits for other ranks. Raises: RanksFailed, naming those that did not arrive."""
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and not any(sign in str(error) for sign in _FAILED):
                raise
            raise RanksFailed(self._describe_failure(error)) from error

    def _describe_failure(self, error: RuntimeError) -> str:
        """One line on who did not arrive. A busy rank is named only if none is dead: it may wait for the dead one."""
        try:
            missing, dead = self._missing()
        except RuntimeError:  # rank 0, where the store was, is gone
            missing = dead = [0]
        if not missing:
            return f"a collective failed, though all ranks take part in it: {first_line(error)}"
        named = ", ".join(f"rank {rank}" for rank in dead or missing)
        return (
            f"{named} ({'stopped or gone' if dead else 'alive, but busy'}) did not arrive at a collective, or left it; "
            "see the log of that rank. If it was only slow, raise learner.collective_timeout_s, which is "
            f"{self._timeout_s:g} s"
        )

    def _missing(self) -> tuple[list[int], list[int]]:
        """The ranks whose collective has not failed, and those of them that show no sign of life."""
        self._write(f"failed/{self.rank}", b"failed")
        missing = [rank for rank in range(self.size) if rank != self.rank]
        reports = {rank: self._read(f"report/{rank}") for rank in missing}
        # rank 0 stays longer: the store may end with it
        deadline = time.monotonic() + _ASK_S + (_REPORT_S if self.is_leader else 0.0)
        while time.monotonic() < deadline and (missing or self.is_leader):
            missing = [rank for rank in missing if self._read(f"failed/{rank}") is None]
            time.sleep(_POLL_S)
        return missing, [rank for rank in missing if self._read(f"report/{rank}") == reports[rank]]

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
        """The text of every rank, in the order of ranks, cut to `_LONGEST` bytes each."""
        rows = torch.zeros(self.size, _LONGEST, dtype=torch.uint8)
        own = text.encode()[:_LONGEST]
        rows[self.rank, : len(own)] = torch.tensor(list(own), dtype=torch.uint8)
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in self.sum(rows)]

    def close(self) -> None:
        """The end of all ranks. Rank 0, with which the store may end, waits for the others."""
        if self.is_leader:
            self.wait_for_answers("left", _LEAVE_S)
        else:
            self.answer("left", "")
        self._end_reports()
        dist.destroy_process_group()

    def _end_reports(self) -> None:
        self._ended.set()
        self._reporter.join()

    def _agree(self) -> str:
        """A name for this life of the ranks. Rank 0 invents it, and writes it together with the names that the others
        gave themselves; each accepts only a life that holds its present name, so nothing of an earlier life counts.
        Raises: RanksFailed, naming the ranks that did not come."""
        own, deadline = secrets.token_hex(16), time.monotonic() + self._timeout_s
        others = range(1, self.size)
        if not self.is_leader:
            self._write(f"hello/{self.rank}", own.encode())
        while time.monotonic() < deadline:
            if self.is_leader:
                hellos = [(self._read(f"hello/{rank}") or b"").decode() for rank in others]
                self._write("life", msgspec.json.encode([own, *hellos]))
                absent = [rank for rank in others if self._read(f"joined/{rank}") != own.encode()]
                if not absent:
                    return own
            else:
                absent = [0]
                life, *hellos = msgspec.json.decode(self._read("life") or b'[""]', type=list[str])
                if hellos[self.rank - 1 : self.rank] == [own]:
                    self._write(f"joined/{self.rank}", life.encode())
                    return life
            time.sleep(_POLL_S)
        raise _absent(absent, self.size, self._timeout_s)

    def _report(self) -> None:
        """Every second, in a thread: this process is alive."""
        reports = 0
        with suppress(RuntimeError):  # rank 0, where the store was, is gone; whoever waits for it reports that
            while not self._ended.wait(_REPORT_S):
                reports += 1
                self._write(f"report/{self.rank}", b"%d" % reports)
                if self._asks:
                    self._write("asked", b"%d" % self.rank)

    def _write(self, name: str, value: bytes) -> None:
        self._store.set(self._name(name), value)  # type: ignore[arg-type]  # bytes are fine

    def _read(self, name: str) -> bytes | None:
        """The value that a rank of this life wrote under a name; None without one."""
        key = self._name(name)
        return bytes(self._store.get(key)) if self._store.check([key]) else None

    def _name(self, name: str) -> str:
        return f"{self._life}/{name}"


def group_timeout(timeout_s: float) -> timedelta:
    """The time-out of a group of ranks whose collectives may take `timeout_s`. NCCL's ends the process and names
    nobody, so it leaves rank 0 the time to name those that are silent while it trains (`training.heartbeat`)."""
    return timedelta(seconds=timeout_s + (_NAMING_S if torch.cuda.is_available() else 0.0))


def _absent(ranks: list[int], size: int, timeout_s: float) -> RanksFailed:
    return RanksFailed(
        f"{', '.join(f'rank {rank}' for rank in ranks)} of {size} did not come within "
        f"learner.collective_timeout_s = {timeout_s:g} s; see its log, and whether all ranks have the same "
        "MASTER_ADDR and MASTER_PORT"
    )


def _store(rank: int, size: int, timeout_s: float) -> Store:
    """Where the ranks meet: at MASTER_ADDR and MASTER_PORT, where rank 0 or torchrun listens; one rank needs no port.
    Rank 0 does not wait in it for the others: `Ranks._agree` names those that are absent.

    Raises: RanksFailed when nobody listens there within `timeout_s`."""
    if size == 1:
        return HashStore()
    host, port, timeout = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(seconds=timeout_s)
    if rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        try:
            return TCPStore(host, port, size, is_master=False, timeout=timeout)
        except dist.DistError as error:
            raise _absent([0], size, timeout_s) from error
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if ip_address(address[0]).is_loopback and ranks_here(size) < size:
            raise ConfigError(
                f"MASTER_ADDR {host} is {address[0]} on this machine (/etc/hosts), where ranks on other nodes do not "
                "reach it; set MASTER_ADDR to an address that they do"
            )
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        raise ConfigError(
            f"rank 0 cannot listen at MASTER_ADDR {host}, MASTER_PORT {port} ({error.strerror}); use an address of "
            "this machine and a free port"
        ) from error
    shared = {"timeout": timeout, "wait_for_workers": False}
    # without the socket, which is the store's now, it would listen on all interfaces
    return TCPStore(host, port, size, is_master=True, master_listen_fd=listening.detach(), **shared)  # type: ignore[arg-type]
