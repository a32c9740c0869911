"""Hosts: network namespaces on one switch, each with its loopback and its address. What dials itself, or listens on
loopback only, is not reached from the other ones."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.conftest import SLOW

PASSWORD = "of-this-test"
SWITCH = "switch"


class Hosts:
    """Processes by host; all are ended at the end."""

    def __init__(self, folder: Path, names: str) -> None:
        """A host for each letter of `names`."""
        self.folder = folder
        self.address = {host: f"10.77.0.{number}" for number, host in enumerate(names, 1)}
        self.environment = {"CUSEARCH_REDIS_PASSWORD": PASSWORD, "CUSEARCH_WEIGHTS_TOKEN": "also-of-this-test"}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._place: dict[str, str] = {}

    def build(self) -> str:
        """Why they cannot be built here; empty when they are."""
        if shutil.which("ip") is None:
            return "iproute2 is not installed"
        switch = ["-n", self.of(SWITCH)]
        steps = [["netns", "add", self.of(host)] for host in (SWITCH, *self.address)]
        steps += [[*switch, "link", "add", SWITCH, "type", "bridge"], [*switch, "link", "set", SWITCH, "up"]]
        for host, address in self.address.items():
            inside, end, other = ["-n", self.of(host)], self._end(host), f"to-{host}"
            steps += [[*inside, "link", "add", end, "type", "veth", "peer", other, "netns", self.of(SWITCH)]]
            steps += [[*inside, "addr", "add", f"{address}/24", "dev", end]]
            steps += [[*inside, "link", "set", name, "up"] for name in ("lo", end)]
            steps += [[*switch, "link", "set", other, "master", SWITCH], [*switch, "link", "set", other, "up"]]
        for step in steps:
            done = subprocess.run(["ip", *step], capture_output=True, text=True, check=False)
            if done.returncode:
                return f"no network namespaces here: ip {' '.join(step)}: {done.stderr.strip()}"
        return ""

    def of(self, host: str) -> str:
        """Its namespace."""
        return f"cusearch-{os.getpid()}-{host}"

    def _end(self, host: str) -> str:
        return f"eth-{host}"

    def inside(self, host: str, *command: str) -> None:
        """Run a command to its end. Raises: CalledProcessError."""
        subprocess.run(["ip", "netns", "exec", self.of(host), *command], check=True, env=os.environ | self.environment)

    def start(self, host: str, name: str, *command: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self._end(host)} | self.environment
        self._place[name] = host
        with self.log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                ["ip", "netns", "exec", self.of(host), *command], stdout=log, stderr=log, env=environment
            )
        return self.processes[name]

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def said(self) -> str:
        return "\n".join(f"--- {name}\n{self.log(name).read_text(errors='replace')[-1500:]}" for name in self.processes)

    def crash(self, host: str) -> None:
        """kill -9 for everything on it."""
        found = subprocess.run(["ip", "netns", "pids", self.of(host)], capture_output=True, text=True, check=True)
        for pid in found.stdout.split():
            subprocess.run(["kill", "-9", pid], check=False, capture_output=True)
        for name, process in self.processes.items():
            if self._place[name] == host:
                process.wait()

    def remove(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(timeout=30 * SLOW)
            except subprocess.TimeoutExpired:
                process.kill()
        for host in (SWITCH, *self.address):  # the cables go with them
            subprocess.run(["ip", "netns", "del", self.of(host)], capture_output=True, check=False)

    # --- the network ------------------------------------------------------------------------------------

    def slow_down(self, host: str, mbit: int, loss_percent: int) -> None:
        """What it sends, to so many Mbit/s; and of what it receives so much gets lost."""
        limit = ("rate", f"{mbit}mbit", "burst", "64kbit", "latency", "50ms")
        self.inside(host, "tc", "qdisc", "add", "dev", self._end(host), "root", "tbf", *limit)
        self._filter(host, "loss", f'iifname "{self._end(host)}" numgen random mod 100 < {loss_percent} drop')

    def cut_off(self, host: str) -> None:
        """Nobody hears of it; connections stay open."""
        self._filter(host, "cut", f'iifname "{self._end(host)}" drop', f'oifname "{self._end(host)}" drop')

    def join_again(self, host: str) -> None:
        self.inside(host, "nft", "delete", "table", "inet", "cut")

    def _filter(self, host: str, table: str, received: str, sent: str = "accept") -> None:
        chains = (("input", received), ("output", sent))
        told = [f"chain {hook} {{ type filter hook {hook} priority 0; {rule}; }}" for hook, rule in chains]
        rules = "\n".join([f"table inet {table} {{", *told, "}"])
        subprocess.run(["ip", "netns", "exec", self.of(host), "nft", "-f", "-"], input=rules, text=True, check=True)
