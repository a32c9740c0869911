"""The ranks of the learner: who hears whom, and who listens where. Real processes, real sockets."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.conftest import SLOW, free_port, wait_until
from tests.sockets import ANYWHERE, listening
from tests.system import rank_script
from tests.system.forked import Command, Forked, Process
from tests.system.rank_script import MESSAGES

pytestmark = pytest.mark.system

RANK = "tests.system.rank_script"


class Processes:
    def __init__(self, kind: type[Process], env: dict[str, str], size: int, folder: Path) -> None:
        self.port = free_port()
        self._said_before = [0] * size
        self._words, self.processes = [], []
        for rank in range(size):
            words = folder / f"words{rank}"
            os.mkfifo(words)
            self._words.append(os.fdopen(os.open(words, os.O_RDWR), "w"))
            own = {"MASTER_PORT": str(self.port), "RANK": str(rank), "LOCAL_RANK": str(rank), "WORDS": str(words)}
            self.processes.append(kind([RANK], folder / f"log{rank}", env | own))

    def say(self, rank: int, *words: str) -> None:
        self._said_before[rank] = len(self.facts(rank))
        self._words[rank].write("".join(f"{word}\n" for word in words))
        self._words[rank].flush()

    def facts(self, rank: int) -> list[dict[str, Any]]:
        log = self.processes[rank].log.read_text()
        assert self.processes[rank].poll() in (None, 0), log
        return [json.loads(line) for line in log.splitlines() if line.startswith("{")]

    def answer(self, rank: int, key: str, timeout_s: float = 120) -> Any:
        """What a rank says under this key after the last `say` to it."""

        def answers() -> list[Any]:
            return [fact[key] for fact in self.facts(rank)[self._said_before[rank] :] if key in fact]

        wait_until(lambda: bool(answers()), timeout_s)
        return answers()[0]

    def ready(self) -> None:
        for rank in range(len(self.processes)):
            wait_until(lambda rank=rank: bool(self.facts(rank)), 120)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for words in self._words:
            words.close()


@pytest.fixture
def start_ranks(tmp_path: Path) -> Iterator[Callable[..., Processes]]:
    made: list[Processes] = []

    def start(size: int, kind: type[Process] = Forked, **env: str) -> Processes:
        shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"} | env
        made.append(Processes(kind, shared, size, tmp_path))
        made[-1].ready()
        return made[-1]

    yield start
    for one in made:
        one.kill()


def test_one_rank_listens_nowhere_but_for_gloo_on_loopback(start_ranks):
    ranks = start_ranks(1, Command)
    assert ranks.facts(0)[0] == {"ready": 0, "sum": 1.0, "gathered": ["0"]}
    places = listening(ranks.processes[0].pid)
    assert all(not place.address.is_unspecified and place.address.is_loopback for place in places), places
    assert ranks.port not in {place.port for place in places}


def test_several_ranks_listen_on_loopback_only(start_ranks):
    ranks = start_ranks(2, Command)
    assert [ranks.facts(rank)[0] for rank in range(2)] == [
        {"ready": rank, "sum": 2.0, "gathered": ["0", "1"]} for rank in range(2)
    ]
    places = [place for process in ranks.processes for place in listening(process.pid)]
    assert ranks.port in {place.port for place in places}
    assert all(place.address.is_loopback for place in places), places
    for address in ANYWHERE:
        with pytest.raises(OSError, match=r"refused|unreachable|Cannot assign"):
            socket.create_connection((address, ranks.port), timeout=2 * SLOW)


def test_noise_and_messages_of_another_life_end_nothing(start_ranks):
    """Before: 500 messages of a stranger, under the names of the next messages, ended both ranks."""
    ranks = start_ranks(2)
    for noise in (b"\0" * 4096, b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)):
        with socket.create_connection(("127.0.0.1", ranks.port)) as stranger:
            stranger.sendall(noise)
    store = TCPStore("127.0.0.1", ranks.port, 2, is_master=False)
    ranks.say(1, "listen")
    for number in range(MESSAGES):
        store.set(f"message/{number}", "message to stop")
    ranks.say(0, "tell")
    for number in range(MESSAGES):
        store.set(f"message/{number}", "message to stop")
    assert ranks.answer(0, "told") == MESSAGES
    wait_until(lambda: len(ranks.facts(1)) == 2, 60)
    assert ranks.facts(1)[1]["heard"] == [f"message {number}" for number in range(MESSAGES)]


def test_a_message_may_be_as_large_as_three_of_the_largest_steps_that_we_ship(start_ranks):
    """192 trajectories of 8,548 tokens are 9 MiB; the store takes 8 MiB in one value. Messages that were heard leave
    the store again."""
    ranks = start_ranks(2)
    sizes = (27, 0, 64, 8, 4, 1, 1, 1, 1)
    ranks.say(0, "tell MiB " + " ".join(map(str, sizes)))
    ranks.say(1, f"listen to {len(sizes)}")
    expected = [[float(mib), 1, str(mib % 10)] if mib else [0.0, 0, ""] for mib in sizes]
    assert ranks.answer(1, "large") == expected
    store = TCPStore("127.0.0.1", ranks.port, 2, is_master=False)
    ranks.say(1, "listen")
    ranks.say(0, "tell")
    wait_until(lambda: len(ranks.facts(1)) == 3, 60)
    assert len(store.list_keys()) < 40


def test_a_rank_that_hangs_is_named_and_one_that_waits_is_not(start_ranks):
    ranks = start_ranks(3)
    ranks.say(1, "wait")
    ranks.say(2, "wait")

    def silent() -> list[int]:
        ranks.say(0, "silent")
        return ranks.answer(0, "silent")

    wait_until(lambda: silent() == [], 60)
    ranks.processes[2].send_signal(signal.SIGSTOP)
    wait_until(lambda: silent() == [2], 60)
    ranks.processes[2].send_signal(signal.SIGCONT)
    wait_until(lambda: silent() == [], 60)


def test_a_rank_that_is_stopped_is_named_by_all_that_wait_for_it(start_ranks):
    ranks = start_ranks(3, TIMEOUT_S=str(3 * SLOW))
    ranks.processes[2].send_signal(signal.SIGSTOP)
    for rank in (0, 1):
        ranks.say(rank, "meet")
    said = (
        "rank 2 (stopped or gone) did not arrive at a collective, or left it; see the log of that rank. "
        f"If it was only slow, raise learner.collective_timeout_s, which is {3 * SLOW:g} s"
    )
    assert [ranks.answer(rank, "failed") for rank in (0, 1)] == [said, said]


@pytest.mark.slow
def test_a_rank_that_is_busy_is_named(start_ranks):
    ranks = start_ranks(2, TIMEOUT_S=str(3 * SLOW))
    ranks.say(0, "meet")
    said = ranks.answer(0, "failed")
    assert said.startswith("rank 1 (alive, but busy) did not arrive at a collective, or left it; see the log")


def test_who_waits_for_the_answer_of_a_rank_that_has_died_is_told(start_ranks):
    """A checkpoint that a dead rank was writing: rank 0 waited for ever, and said nothing."""
    ranks = start_ranks(2, TIMEOUT_S=str(3 * SLOW))
    ranks.processes[1].kill()
    ranks.say(0, "answers")
    assert ranks.answer(0, "failed") == f"rank 1 has not reported for {3 * SLOW:g} s; see the log of that rank"


def test_a_rank_that_dies_is_named_at_once(start_ranks):
    """By the ranks that are connected with it, and these end; so whoever waits for them learns of it too."""
    ranks = start_ranks(3, TIMEOUT_S="600")
    ranks.say(0, "meet", "die")
    ranks.say(1, "meet", "die")
    ranks.processes[2].kill()
    said = [ranks.answer(rank, "failed", 30) for rank in (0, 1)]
    assert all("(stopped or gone) did not arrive at a collective, or left it; see the log" in each for each in said)
    assert any(each.startswith("rank 2 (stopped or gone)") for each in said)


@pytest.mark.slow
def test_the_first_rank_ends_last_because_the_store_ends_with_it(start_ranks):
    ranks = start_ranks(2)
    ranks.say(0, "tell one", "end")
    with pytest.raises(subprocess.TimeoutExpired):
        ranks.processes[0].wait(1)
    ranks.say(1, "wait", "end")
    assert [process.wait(60 * SLOW) for process in ranks.processes] == [0, 0]


def errors_of_a_rank(env: dict[str, str], folder: Path) -> str:
    """What a rank that cannot start says."""
    said, _ = Forked([RANK], folder / "log", {"OMP_NUM_THREADS": "1"} | env).communicate(timeout=90 * SLOW)
    return said


@pytest.mark.parametrize("of_torchrun", [True, False])
@pytest.mark.parametrize(("rank", "absent"), [("0", "rank 1, rank 2"), ("1", "rank 0")])
def test_ranks_that_do_not_come_are_named(tmp_path, rank, absent, of_torchrun):
    """To torchrun's store, or to that of rank 0. Before: a raw DistStoreError that named nobody."""
    port = free_port()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if of_torchrun else None
    env = {"WORLD_SIZE": "3", "RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TIMEOUT_S": "2"}
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True"} if of_torchrun else {}
    said = errors_of_a_rank(env, tmp_path)
    assert f"RanksFailed: {absent} of 3 did not come within learner.collective_timeout_s = 2 s" in said
    del store


@pytest.mark.slow
@pytest.mark.parametrize("stage", "0123")
def test_the_collectives_of_deepspeed_have_the_same_time_out(tmp_path, stage):
    """Its group is one of its own; by torch's default a rank would wait for half an hour."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    timeout_s = 3 * SLOW  # the ranks must also come within it
    settings = ["--learner.collective_timeout_s", f"{timeout_s}", "--learner.zero_stage", stage, "--learner.ranks", "2"]
    command = ["tests.system.half_a_meeting", *settings]
    first, second = (
        Forked(command, tmp_path / f"log{rank}", shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    )
    try:
        said, _ = first.communicate(timeout=120 * SLOW)
    finally:
        second.send_signal(signal.SIGKILL)
    *_, waited, last = said.strip().splitlines()
    assert last.startswith("rank: rank 1 (stopped or gone) did not arrive at a collective, or left it"), said
    assert last.endswith(f"raise learner.collective_timeout_s, which is {timeout_s:g} s")
    assert 2.5 * SLOW < float(waited) < 30 * SLOW


@pytest.mark.parametrize("store", ["--standalone", pytest.param("--master_addr=127.0.0.1", marks=pytest.mark.slow)])
def test_torchrun_starts_the_ranks_too(store):
    """With a store of torchrun's own, and with the store that rank 0 makes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", store]
    command += [f"--master_port={free_port()}"] if "addr" in store else []
    done = subprocess.run(
        [*command, rank_script.__file__],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180 * SLOW,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert {json.loads(line)["sum"] for line in done.stdout.splitlines()} == {2.0}


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])
def test_an_address_that_other_nodes_do_not_reach_is_refused_in_one_line(tmp_path, name):
    """/etc/hosts of Debian says that a host's own name is 127.0.1.1: the ranks of other nodes found nobody there."""
    env = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
    said = errors_of_a_rank(env | {name: "1"}, tmp_path)
    assert re.search(r"ConfigError: MASTER_ADDR localhost is \S+ on this machine \(/etc/hosts\), where ranks", said), (
        said
    )


def test_an_address_that_is_not_this_machines_is_refused_in_one_line(tmp_path):
    env = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "203.0.113.1", "MASTER_PORT": "29511"}
    assert "ConfigError: rank 0 cannot listen at MASTER_ADDR 203.0.113.1, MASTER_PORT 29511" in errors_of_a_rank(
        env, tmp_path
    )
