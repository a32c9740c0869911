"""Where a process listens, by the kernel's own tables."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Place:
    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int


def listening(*processes: int) -> list[Place]:
    """TCP sockets that these processes listen on, those of their children not."""
    mine: set[str] = set()
    for process in processes:
        for link in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                mine.add(str(link.readlink()))
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = words = line.split()
            if state == "0A" and f"socket:[{words[9]}]" in mine:
                host, port = local.split(":")
                found.append(Place(_address(host), int(port, 16)))
    return found


def family(process: int) -> list[int]:
    """A process and all that it has started."""
    root = psutil.Process(process)
    return [process, *(child.pid for child in root.children(recursive=True))]


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """As the kernel writes it: words of four bytes, each in the machine's order."""
    raw = b"".join(bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8))
    address = ipaddress.ip_address(raw)
    return getattr(address, "ipv4_mapped", None) or address


def _own_addresses() -> Iterable[str]:
    """This machine's addresses that others reach it at."""
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            is_ip = one.family in (socket.AF_INET, socket.AF_INET6)
            if is_ip and not ipaddress.ip_address(one.address.partition("%")[0]).is_loopback:
                yield one.address


ANYWHERE = sorted(_own_addresses())
