"""The processes of one campaign: started, watched, started again; Redis behind two faulty links, the retriever behind a
gateway, and weights that go from one machine to others behind a third link."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import redis.asyncio as aioredis
from redis import exceptions

from cusearch_async.config import Config, load_config
from cusearch_async.lifecycle.children import start_child
from cusearch_async.transport.buffer import RedisBuffer
from cusearch_async.transport.connection import Connection
from cusearch_async.transport.keys import Keys
from cusearch_async.transport.limits import limits_of
from cusearch_async.transport.server import is_listening, server_command
from tests.conftest import SLOW, free_port, handles_sigterm
from tests.object_stores import SERVER, make_bucket, s3_environment
from tests.system.chaos.gateway import Gateway
from tests.system.chaos.proxy import Link
from tests.system.chaos.transfers import WebLink
from tests.system.forked import Forked

ATLAS = Path(__file__).parents[3] / "configs" / "atlas.toml"
RUN = "chaos"
LEASE_S = 2.0
STUCK_S = 90 * SLOW
"""A run that commits nothing for so long, beyond what the faults explain, is stuck."""
SETTINGS: dict[str, Any] = {
    "run.name": RUN,
    "run.steps": 1_000_000,
    "run.wait_s": 120 * SLOW,
    "run.stall_s": 60 * SLOW,
    "pool.questions": 4,
    "pool.rollouts": 2,
    "pool.max_attempts": 1000,
    "method.budget": 4,
    "loss.minibatch": 4,
    "loss.kl_coef": 0,
    "episode.timeout_s": 20,
    "learner.lr": 1e-6,
    "learner.checkpoint_every": 5,
    "learner.keep_checkpoints": 3,
    "learner.cores": [],
    "rollout.cores": [],
    "rollout.max_episodes": 8,
    "redis.lease_s": LEASE_S,
    "redis.timeout_s": 1,
    "redis.outage_s": 40,
    "retriever.timeout_s": 2,
    "retriever.outage_s": 60,
}
SERVERS = ("redis", "retriever")
BUCKET = "weights"


Started = Forked | subprocess.Popen[bytes]


class Stuck(Exception):
    """The run has stopped moving."""


class Scene:
    def __init__(self, folder: Path, seed: int, engines: list[str], changes: dict[str, Any], turn_s: float) -> None:
        """`engines`: one of `light` and `vllm` for each worker; `turn_s`: the longest turn of a light one."""
        self.folder, self.run_folder = folder, folder / "run"
        self.record, self.logs = folder / "record", folder / "logs"
        for made in (self.record, self.logs):
            made.mkdir(parents=True)
        self.seed, self._turn_s = seed, turn_s
        self.random = random.Random(seed)
        self.keys = Keys(RUN)
        self.redis_port, self.retriever_port = free_port(), free_port()
        self.links = {"worker": Link(self.redis_port), "learner": Link(self.redis_port)}
        self._transport, self._weights_port = changes.get("weights.transport", "folder"), free_port()
        if self._transport != "folder":
            self.links["weights"] = WebLink(self._weights_port)
        self._servers = (*SERVERS, "objects") if self._transport == "object" else SERVERS
        self.gateway = Gateway(self.retriever_port, seed)
        self.workers = [f"worker-{i}" for i in range(len(engines))]
        self._engines = dict(zip(self.workers, engines, strict=True))
        self.settings = SETTINGS | {"run.folder": self.run_folder} | changes
        self.processes: dict[str, Started] = {}
        self.guests: dict[str, Started] = {}
        """Processes that are not started again: an old learner, a worker with another config."""
        self.stopped: Counter[str] = Counter()
        """How many faults hold a process by SIGSTOP now."""
        self.spoiled: set[str] = set()
        """Checkpoints that a fault has torn."""
        self.restarts: Counter[str] = Counter()
        self.ended_alone: list[dict[str, Any]] = []
        self.most_mib: dict[str, float] = {}
        self._expected: set[int] = set()
        """Process ids whose end is our doing."""
        self._born: dict[str, float] = {}
        self._client = aioredis.Redis(
            port=self.redis_port, decode_responses=False, socket_timeout=20, socket_connect_timeout=2, retry=None
        )
        self.began = time.monotonic()

    # --- starting and ending --------------------------------------------------------------------------

    async def start(self) -> None:
        for link in self.links.values():
            await link.start()
        await self.gateway.start()
        scripts = script_shas(self.config())
        for link in self.links.values():
            link.scripts = scripts
        for name in self._servers:
            self.launch(name)
        if self._transport == "object":
            await asyncio.to_thread(make_bucket, f"http://127.0.0.1:{self._weights_port}", BUCKET)
        for name in ("learner", *self.workers):
            self.launch(name)

    def arguments(self, name: str, **changes: Any) -> list[str]:
        link = self.links["learner" if name.startswith("learner") else "worker"]
        retriever = self.retriever_port if name == "retriever" else self.gateway.port
        values = self.settings | {
            "redis.url": f"redis://127.0.0.1:{link.port}/0",
            "retriever.url": f"http://127.0.0.1:{retriever}",
        }
        if self._transport == "http":
            port = self._weights_port if name.startswith("learner") else self.links["weights"].port
            values["weights.url"] = f"http://127.0.0.1:{port}"
        if self._transport != "folder" and not name.startswith("learner"):
            values["weights.folder"] = self.host(name)
        values |= {key.replace("__", "."): value for key, value in changes.items()}
        overrides = [part for key, value in values.items() for part in (f"--{key}", str(value))]
        return [str(ATLAS), *overrides]

    def host(self, worker: str) -> Path:
        """The folder of the machine of a worker that shares no folder with the learner."""
        return self.folder / "hosts" / worker

    def config(self) -> Config:
        return load_config(ATLAS, self.arguments("learner")[1:])

    def command(self, name: str, **changes: Any) -> list[str]:
        """Module and arguments of a process."""
        if name == "retriever":
            return ["cusearch_async.cli.main", "worker", "retriever", *self.arguments(name)]
        if name.startswith("learner"):
            return ["tests.system.chaos.record", "learner", *self.arguments(name, **changes)]
        if self._engines.get(name, "light") == "light":
            return ["tests.system.light_worker", *self.arguments(name, **changes)]
        return ["tests.system.chaos.record", "rollout", *self.arguments(name, **changes)]

    def spawn(self, name: str, **changes: Any) -> Started:
        log = self.logs / f"{name}.log"
        if name == "redis":
            command = server_command(f"redis://127.0.0.1:{self.redis_port}/0", self.folder / "redis", None)
            return start_child(command, log_file=log)
        if name == "objects":
            return start_child([str(SERVER), "-H", "127.0.0.1", "-p", str(self._weights_port)], log_file=log)
        environment = {"CHAOS_RECORD": str(self.record), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        environment["LIGHT_TURN_S"] = str(self._turn_s)
        if self._transport == "object":
            environment |= s3_environment(f"http://127.0.0.1:{self.links['weights'].port}")
        return Forked(self.command(name, **changes), log, environment)

    def launch(self, name: str) -> None:
        self.processes[name] = self.spawn(name)
        self._born[name] = time.monotonic()

    def end(self, process: Started) -> None:
        """kill -9, children and all."""
        self._expected.add(process.pid)
        process.kill()
        process.wait()

    def take_down(self, name: str) -> None:
        """kill -9; nobody starts it again but `launch`."""
        self.end(self.processes.pop(name))

    def kill(self, name: str) -> None:
        """kill -9 and start again."""
        self.take_down(name)
        self.restarts[name] += 1
        self.launch(name)

    async def stop_for(self, name: str, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long; unless the process is another one by then."""
        process = self.processes[name]
        self.stopped[name] += 1
        try:
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(seconds)
        finally:
            self.stopped[name] -= 1
            if not self.stopped[name] and process.poll() is None:
                process.send_signal(signal.SIGCONT)

    async def limit_files(self, name: str, most_bytes: int, seconds: float) -> None:
        """No file of the process may grow beyond `most_bytes`: a full disk, as far as it can see."""
        process = self.processes[name]
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most_bytes, hard))
        await asyncio.sleep(seconds)
        if process.poll() is None:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))

    async def stop(self) -> None:
        """The learner first, then the workers, then what they need; whoever does not end is named."""
        everyone = {**self.guests, **self.processes}
        order = sorted(everyone, key=lambda name: (name in self._servers, not name.startswith("learner")))
        for name in order:
            await self._terminate(name, everyone[name])
        await self.gateway.stop()
        await self._client.aclose()

    async def _terminate(self, name: str, process: Started) -> int | None:
        self._expected.add(process.pid)
        if process.poll() is None:
            process.terminate()
            process.send_signal(signal.SIGCONT)  # a fault may have put it to sleep
        deadline = time.monotonic() + 30 * SLOW
        while process.poll() is None:
            if time.monotonic() > deadline:
                self.ended_alone.append({"process": name, "status": None, "said": "did not end on SIGTERM"})
                process.kill()
                process.wait()
            await asyncio.sleep(0.05)
        return process.returncode

    async def quiet(self) -> None:
        """The learner and the workers end by SIGTERM; Redis goes on, to be read."""
        for name in ("learner", *self.workers, *self.guests):
            await self.dismiss(name)

    async def dismiss(self, name: str) -> None:
        """SIGTERM, and it has to end well; nobody starts it again but `launch`."""
        process = self.processes.pop(name, None) or self.guests.pop(name, None)
        if process is not None:
            begins = process.poll() is None and not handles_sigterm(process.pid)
            status = await self._terminate(name, process)
            if begins and status == -signal.SIGTERM:
                return
            is_drained = status == 128 + signal.SIGTERM
            if status and not is_drained and "stopped while" not in self.last_words(name):  # it was starting
                self.ended_alone.append({"process": name, "status": status, "said": self.last_words(name)})

    # --- watching -------------------------------------------------------------------------------------

    async def supervise(self) -> None:
        """Start again what ends; remember what nobody ended. For ever."""
        looked_at = 0.0
        while True:
            for name, process in list(self.processes.items()):
                if process.poll() is not None and time.monotonic() - self._born[name] > 1:
                    if process.pid not in self._expected:
                        told = {"process": name, "status": process.returncode, "said": self.last_words(name)}
                        self.ended_alone.append({"at": self.clock(), **told})
                    self.restarts[name] += 1
                    self.launch(name)
            if time.monotonic() - looked_at > 2:
                looked_at = time.monotonic()
                self._measure()
            await asyncio.sleep(0.1)

    def clock(self) -> float:
        return round(time.monotonic() - self.began, 1)

    def last_words(self, name: str) -> str:
        log = self.logs / f"{name}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return next((line for line in reversed(lines) if line.strip()), "")[:400]

    def _measure(self) -> None:
        for name, process in self.processes.items():
            try:
                family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
                mib = sum(member.memory_info().rss for member in family) / 2**20
            except psutil.Error:
                continue
            kind = name.split("-")[0] if self._engines.get(name, "light") == "light" else "vllm worker"
            self.most_mib[kind] = round(max(self.most_mib.get(kind, 0.0), mib), 1)

    # --- Redis, directly ------------------------------------------------------------------------------

    async def ask(self, command: Callable[[Any], Awaitable[Any]]) -> Any:
        """The answer of Redis itself; None while it does not answer."""
        try:
            return await command(self._client)
        except (exceptions.RedisError, OSError, TimeoutError):
            return None

    async def step(self) -> int:
        """The next step to commit; -1 while nobody can say."""
        raw = await self.ask(lambda client: client.hget(self.keys.state, "step"))
        return int(raw) if raw is not None else -1

    async def epoch(self) -> int:
        raw = await self.ask(lambda client: client.hget(self.keys.state, "epoch"))
        return int(raw or 0)

    async def wait_for_successor(self, epoch: int) -> None:
        """Until a learner has taken over from the one of `epoch`. Raises: Stuck."""
        deadline = time.monotonic() + STUCK_S
        while await self.epoch() <= epoch:
            if time.monotonic() > deadline:
                raise Stuck(f"no learner takes over from epoch {epoch}; learner: {self.last_words('learner')}")
            await asyncio.sleep(0.1)

    async def wait_for_steps(self, more: int, patience_s: float) -> None:
        """Until the run has committed `more` steps. Raises: Stuck."""
        before, made, deadline = await self.step(), 0, time.monotonic() + patience_s
        while made < more:
            if time.monotonic() > deadline:
                raise Stuck(f"{made} steps in {patience_s:.0f} s, at {before}; learner: {self.last_words('learner')}")
            await asyncio.sleep(0.1)
            now = await self.step()
            if now >= 0:  # it goes back where a learner goes on from its checkpoint
                made += max(0, now - before) if before >= 0 else 0
                before = now

    async def wait_until_serving(self) -> None:
        deadline = time.monotonic() + 60 * SLOW
        urls = [f"redis://127.0.0.1:{self.redis_port}", f"http://127.0.0.1:{self.retriever_port}"]
        while not all(map(is_listening, urls)):
            if time.monotonic() > deadline:
                raise Stuck("Redis or the retriever does not listen")
            await asyncio.sleep(0.1)


def script_shas(config: Config) -> dict[bytes, str]:
    """SHA-1 -> name of every script of the buffer."""
    buffer = RedisBuffer(Connection(config.redis, 0), config.run.name, limits_of(config))
    return {script.sha.encode(): name for name, script in buffer._scripts.items()}


def fresh_folder(out: Path) -> Path:
    """`out`, made empty; what an earlier run of ours has left there is deleted, and nothing else ever."""
    mark = out / ".made-by-tests"
    if out.exists():
        if not mark.exists():
            sys.exit(f"--out {out} exists and was not made by these tests; choose another")
        shutil.rmtree(out)
    out.mkdir(parents=True)
    mark.touch()
    return out.resolve()


def tiny_model(folder: Path) -> Path:
    """A Qwen2 of a few thousand parameters with the atlas tokenizer; made once."""
    if not (folder / "tokenizer.json").exists():
        script = (
            "import sys, torch; from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM\n"
            "from cusearch_async.config import STARTER; torch.manual_seed(0)\n"
            "c = Qwen2Config(vocab_size=384, hidden_size=8, intermediate_size=16, num_hidden_layers=1,\n"
            "    num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=1024, eos_token_id=375,\n"
            "    bos_token_id=None, pad_token_id=375)\n"
            "Qwen2ForCausalLM(c).save_pretrained(sys.argv[1])\n"
            "AutoTokenizer.from_pretrained(STARTER).save_pretrained(sys.argv[1])\n"
        )
        subprocess.run(
            [sys.executable, "-c", script, str(folder)], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
    return folder


def write_line(path: Path, facts: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(facts) + "\n")
