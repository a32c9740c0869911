"""Everything that goes wrong in a campaign, one function a kind.

A fault returns what exactly it did, or None where there was nothing to spoil (it is then drawn again later). Faults of
one lane follow each other, those of several lanes overlap."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil

from cusearch_async.transport import codec
from tests.conftest import SLOW
from tests.system.chaos.gateway import HOSTILE
from tests.system.chaos.scene import LEASE_S, STUCK_S, Scene
from tests.system.chaos.spoiling import BAD_PAYLOADS, spoil, spoil_payload
from tests.system.chaos.transfers import TRANSFERS, spoiled_copy, transfer

Act = Callable[[Scene, random.Random], Awaitable[str | None]]
AGENT = "docs.examples.program"
RECENT_S = 20.0
"""A script that was called so long ago is likely to be called again."""
PAUSES = {"0.5 s": 0.5, "1 lease": LEASE_S, "2 leases": 2 * LEASE_S, "longer": 3.5 * LEASE_S}


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    name: str
    lane: str
    act: Act


# --- processes ------------------------------------------------------------------------------------------


def kill(who: str) -> Act:
    async def act(scene: Scene, draw: random.Random) -> str:
        name = draw.choice(scene.workers) if who == "worker" else who
        await asyncio.sleep(draw.uniform(0, 1))
        scene.kill(name)
        if who in ("redis", "retriever"):
            await scene.wait_until_serving()
        return name

    return act


async def kill_agent(scene: Scene, draw: random.Random) -> str | None:
    """The program of an episode, whatever it is doing."""
    workers = {scene.processes[name].pid for name in scene.workers}
    asked = psutil.process_iter(["ppid", "cmdline"])  # of one that is gone or a zombie it has none
    agents = [one for one in asked if one.info["ppid"] in workers and AGENT in " ".join(one.info["cmdline"] or [])]
    if not agents:
        return None
    draw.choice(agents).kill()
    return f"one of {len(agents)}"


def pause(who: str) -> Act:
    async def act(scene: Scene, draw: random.Random) -> str:
        name = draw.choice(scene.workers) if who == "worker" else who
        how_long = draw.choice(list(PAUSES))
        await scene.stop_for(name, PAUSES[how_long])
        return how_long

    return act


def leave(how_many: str) -> Act:
    """Workers are told to end, and finish their episodes; others come up to four seconds later."""

    async def act(scene: Scene, draw: random.Random) -> str:
        leaving = scene.workers if how_many == "all" else [draw.choice(scene.workers)]
        await asyncio.gather(*(scene.dismiss(name) for name in leaving))
        later_s = draw.choice((0.0, 1.0, 4.0))
        await asyncio.sleep(later_s)
        for name in leaving:
            scene.launch(name)
        return f"others {later_s:.0f} s later"

    return act


async def overlapping_learner(scene: Scene, draw: random.Random) -> str:
    """A second learner starts over a running one; the older has to end by itself."""
    older, epoch = _step_aside(scene), await scene.epoch()
    scene.launch("learner")
    await scene.wait_for_successor(epoch)
    await _must_end(scene, older, "the older of two learners")
    return "started over a running one"


async def sleeping_learner(scene: Scene, draw: random.Random) -> str:
    """A learner sleeps, wherever it is, while its successor makes a checkpoint, or waits for the port that it has; then
    it wakes."""
    await asyncio.sleep(draw.uniform(0, 1))
    older, epoch = _step_aside(scene), await scene.epoch()
    older.send_signal(19)
    scene.launch("learner")
    await scene.wait_for_successor(epoch)
    saved = asyncio.create_task(scene.wait_for_steps(2 * int(scene.settings["learner.checkpoint_every"]), STUCK_S))
    while not saved.done() and "waiting for port" not in scene.last_words("learner"):
        await asyncio.sleep(0.1)
    older.send_signal(18)
    await _must_end(scene, older, "a learner that woke after its successor")
    await saved
    return "woke after its successor"


def _step_aside(scene: Scene) -> Any:
    """The learner becomes a guest: nobody starts it again."""
    older = scene.processes.pop("learner")
    scene.guests[f"learner-{older.pid}"] = older
    scene._expected.add(older.pid)
    return older


async def _must_end(scene: Scene, process: Any, who: str) -> None:
    deadline = asyncio.get_running_loop().time() + 20 * SLOW
    while process.poll() is None:
        if asyncio.get_running_loop().time() > deadline:
            scene.ended_alone.append({"process": who, "status": None, "said": "trains on beside its successor"})
            scene.end(process)
        await asyncio.sleep(0.1)
    scene.guests.pop(f"learner-{process.pid}", None)


async def worker_with_another_config(scene: Scene, draw: random.Random) -> str:
    """It is refused before it has loaded weights, and so before it takes a ticket."""
    changes: dict[str, dict[str, Any]] = {
        "max_staleness": {"pool__max_staleness": 6},
        "N": {"pool__questions": 16},
        "G 1": {"pool__rollouts": 1, "method__budget": 4},
        "G 3": {"pool__rollouts": 3},
        "seed": {"run__seed": 7},
    }
    what = draw.choice(list(changes))
    process = scene.spawn("guest", **changes[what])
    scene.guests["guest"] = process
    for _ in range(int(100 * SLOW)):
        await asyncio.sleep(0.1)
        if process.poll() is not None:
            break
    if b"loaded weights" in (scene.logs / "guest.log").read_bytes():
        scene.ended_alone.append({"process": "guest", "status": process.poll(), "said": f"plays with another {what}"})
    scene.end(process)
    scene.guests.pop("guest", None)
    (scene.logs / "guest.log").rename(scene.logs / f"guest-{process.pid}.log")
    return what


# --- files ----------------------------------------------------------------------------------------------


async def torn_checkpoint(scene: Scene, draw: random.Random) -> str | None:
    """The newest of at least two is spoiled while no learner runs."""
    folder = scene.run_folder / "checkpoints"
    scene.take_down("learner")
    found = sorted(folder.glob("step*"))
    how = None
    if len(found) >= 2:
        scene.spoiled.add(found[-1].name)
        how = spoil(draw.choice([path for path in sorted(found[-1].rglob("*")) if path.is_file()]), draw)
    scene.launch("learner")
    return how


async def torn_weights(scene: Scene, draw: random.Random) -> str | None:
    """The announced version is spoiled, and a worker has to start with it; the learner sleeps meanwhile. Where no other
    worker can go on with what it has, the learner publishes it again."""
    learner = scene.processes["learner"]
    learner.send_signal(19)
    try:
        name = await scene.ask(lambda client: client.hget(scene.keys.state, "weights"))
        path = scene.run_folder / "weights" / (name or b"none").decode() / "model.safetensors"
        if not name or not path.exists():
            return None
        how = spoil(path, draw)
        scene.kill(draw.choice(scene.workers))
        await asyncio.sleep(2)
    finally:
        if learner.poll() is None:
            learner.send_signal(18)
    return how


async def late_weights(scene: Scene, draw: random.Random) -> str | None:
    """For two seconds every new version becomes visible two seconds late, as on a network file system."""
    folder, hidden = scene.run_folder / "weights", scene.folder / "hidden"
    hidden.mkdir(exist_ok=True)
    known, moved = {path.name for path in folder.glob("v*")}, []
    for _ in range(400):
        for path in folder.glob("v*"):
            if path.name not in known:
                known.add(path.name)
                path.rename(hidden / path.name)
                moved.append(path)
        await asyncio.sleep(0.005)
    await asyncio.sleep(2)
    for path in moved:
        (hidden / path.name).rename(path)
    return "hidden for 2 s" if moved else None


async def torn_metrics(scene: Scene, draw: random.Random) -> str:
    """As a kill in the middle of a line, or a power cut, leaves the file."""
    how = draw.choice(("half a line", "zeros"))
    scene.take_down("learner")
    with (scene.run_folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 7, "reward/all": 0.1' if how == "half a line" else bytes(200))
    scene.launch("learner")
    return how


def full_disk(who: str) -> Act:
    async def act(scene: Scene, draw: random.Random) -> str:
        name = draw.choice(scene.workers) if who == "worker" else who
        await scene.limit_files(name, draw.choice((1, 1000, 4000, 20_000)), 3)
        return "no file may grow"

    return act


# --- Redis ----------------------------------------------------------------------------------------------


async def _buffered(scene: Scene, draw: random.Random, most: int) -> list[str]:
    """Some of what waits in the buckets."""

    async def read(client: Any) -> list[bytes]:
        found: list[bytes] = []
        for depth in range(6):
            found += await client.zrange(scene.keys.depth(depth), 0, -1)
        return found

    found = sorted(id_.decode() for id_ in await scene.ask(read) or [])
    return draw.sample(found, min(len(found), draw.randint(1, most)))


async def evicted(scene: Scene, draw: random.Random) -> str | None:
    what = draw.choice(("hash", "payload", "both"))
    ids = await _buffered(scene, draw, 3)
    keys = [scene.keys.trajectory(i) for i in ids if what != "payload"]
    keys += [scene.keys.payload(i) for i in ids if what != "hash"]
    gone = await scene.ask(lambda client: client.delete(*keys)) if keys else 0
    return what if gone else None


async def evicted_from_kept_pool(scene: Scene, draw: random.Random) -> str | None:
    """Out of a pool that a learner will claim again: it is killed."""
    scene.take_down("learner")
    gone = 0
    pools = await scene.ask(lambda client: client.keys(scene.keys.prefix + "pool:*")) or []
    if pools:
        pool = draw.choice(sorted(pools))
        ids = [id_.decode() for id_ in await scene.ask(lambda client: client.lrange(pool, 0, -1)) or []]
        what = draw.choice((scene.keys.trajectory, scene.keys.payload))
        gone = await scene.ask(lambda client: client.delete(what(draw.choice(ids)))) if ids else 0
    scene.launch("learner")
    return "one of a kept pool" if gone else None


async def bad_payload(scene: Scene, draw: random.Random) -> str | None:
    what = draw.choice(BAD_PAYLOADS)
    for id_ in await _buffered(scene, draw, 1):
        payload = await scene.ask(lambda client, id_=id_: client.get(scene.keys.payload(id_)))
        try:
            bad = spoil_payload(what, payload or b"", scene.config().episode.max_tokens)
        except (codec.CorruptPayload, IndexError):
            continue  # spoiled or gone already
        kept = await scene.ask(lambda client, id_=id_, bad=bad: client.set(scene.keys.payload(id_), bad, xx=True))
        return what if kept else None
    return None


async def another_schema(scene: Scene, draw: random.Random) -> str | None:
    """Everything that waits was stored by another version of the program."""
    ids = await _buffered(scene, draw, 1)
    if not ids:
        return None
    waiting = await scene.ask(lambda client: client.keys(scene.keys.prefix + "payload:*")) or []
    for key in waiting:
        await scene.ask(lambda client, key=key: client.setrange(key, 3, b"\x63"))
    return "all payloads"


async def clock_step(scene: Scene, draw: random.Random) -> str:
    """The server's clock jumps: to the scripts it is the same as everything that is kept of it having been shifted the
    other way, the time of the last call and of every heartbeat. (Leases are kept by the run's own clock.)"""
    hours = draw.choice((-3, -1, 1, 3))
    script = """
        if redis.call('EXISTS', ARGV[2] .. 'clock') == 0 then return 0 end
        redis.call('HINCRBY', ARGV[2] .. 'clock', 'wall', -ARGV[1])
        local all = redis.call('ZRANGE', ARGV[2] .. 'workers', 0, -1)
        for _, name in ipairs(all) do redis.call('ZINCRBY', ARGV[2] .. 'workers', -ARGV[1], name) end
        return 1"""
    await scene.ask(lambda client: client.eval(script, 1, scene.keys.state, hours * 3_600_000, scene.keys.prefix))
    return f"{hours:+d} h"


async def no_memory(scene: Scene, draw: random.Random) -> str:
    await scene.ask(lambda client: client.config_set("maxmemory", "100kb"))
    await asyncio.sleep(draw.uniform(0.5, 2))
    for _ in range(100):
        if await scene.ask(lambda client: client.config_set("maxmemory", "0")):
            break
        await asyncio.sleep(0.2)
    return "for a while"


async def scripts_forgotten(scene: Scene, draw: random.Random) -> str:
    await scene.ask(lambda client: client.script_flush())
    return "SCRIPT FLUSH"


async def flushed(scene: Scene, draw: random.Random) -> str:
    """The database is emptied under the run; the learner is started again if it does not end by itself."""
    await scene.wait_for_steps(int(scene.settings["learner.checkpoint_every"]) + 2, STUCK_S)
    how = draw.choice(("and the learner killed", "under the run"))
    await scene.ask(lambda client: client.flushall())
    if how == "and the learner killed":
        await asyncio.sleep(draw.uniform(0, 2))
        scene.kill("learner")
    await scene.wait_for_steps(3, STUCK_S)
    return how


# --- the network ----------------------------------------------------------------------------------------


def network(what: str) -> Act:
    async def act(scene: Scene, draw: random.Random) -> str | None:
        whose = draw.choice(list(scene.links))
        link, seconds = scene.links[whose], draw.choice((0.3, 0.8, 1.5, 3.0))
        if what == "cut":
            link.cut()
        elif what == "answers lost":
            await link.lose_answers(seconds)
        elif what == "half open":
            await link.half_open(seconds)
        elif what == "slow":
            await link.delay(seconds, draw.choice((0.05, 0.3, 1.2)))
        elif what == "partition":
            up, down = draw.choice(((True, False), (False, True), (True, True)))
            await link.partition(seconds, up=up, down=down)
            return f"{whose}, {'commands' * up}{' and ' * (up and down)}{'answers' * down} held"
        return whose

    return act


def late_command(*, is_copy: bool) -> Act:
    async def act(scene: Scene, draw: random.Random) -> str | None:
        link = scene.links[draw.choice(("worker", "learner"))]
        recent = sorted(name for name, at in link.seen.items() if time.monotonic() - at < RECENT_S)
        if not recent:
            return None
        script, after, most_s = draw.choice(recent), draw.choice((1, 5, 40, 200)), draw.choice((0.5, 2.0, 6.0))
        was_sent = await link.deliver_late(script, after, most_s, is_copy=is_copy, patience_s=5)
        return script if was_sent else None

    return act


async def late_recover(scene: Scene, draw: random.Random) -> str | None:
    """The command by which a learner has taken over comes once more, seconds later."""
    scene.take_down("learner")
    scene.launch("learner")
    link, most_s = scene.links["learner"], draw.choice((1.0, 4.0))
    was_sent = await link.deliver_late("recover", 1000, most_s, is_copy=True, patience_s=40 * SLOW)
    return "recover, a second time" if was_sent else None


# --- the retriever --------------------------------------------------------------------------------------


def hostile(how: str) -> Act:
    async def act(scene: Scene, draw: random.Random) -> str | None:
        whole = how.startswith("status 4")
        seconds = 2.0 if whole else draw.uniform(0.2, 0.8)
        share = 1.0 if whole else draw.choice((0.1, 0.3, 1.0))
        most = 3 if how in ("10 MB", "gzip bomb") else 1000
        return how if await scene.gateway.spoil(how, seconds, share, most, 10 * SLOW) else None

    return act


KINDS = (
    *(Kind(f"kill {who}", lane, kill(who)) for who, lane in (("worker", "worker"), ("learner", "learner"))),
    Kind("kill agent", "agent", kill_agent),
    *(Kind(f"kill {who}", "servers", kill(who)) for who in ("redis", "retriever")),
    Kind("pause worker", "worker", pause("worker")),
    Kind("pause learner", "learner", pause("learner")),
    Kind("pause redis", "servers", pause("redis")),
    Kind("pause retriever", "servers", pause("retriever")),
    Kind("overlapping learner", "learner", overlapping_learner),
    Kind("sleeping learner", "learner", sleeping_learner),
    Kind("worker with another config", "worker", worker_with_another_config),
    Kind("torn checkpoint", "learner", torn_checkpoint),
    Kind("torn weights", "learner", torn_weights),
    Kind("late weights", "learner", late_weights),
    Kind("torn metrics", "learner", torn_metrics),
    Kind("full disk learner", "learner", full_disk("learner")),
    Kind("full disk redis", "servers", full_disk("redis")),
    Kind("late recover", "learner", late_recover),
    Kind("evicted", "content", evicted),
    Kind("bad payload", "content", bad_payload),
    Kind("clock step", "content", clock_step),
    Kind("no memory", "content", no_memory),
    Kind("scripts forgotten", "content", scripts_forgotten),
    *(Kind(what, "network", network(what)) for what in ("cut", "answers lost", "half open", "slow", "partition")),
    Kind("duplicated command", "network", late_command(is_copy=True)),
    Kind("delayed command", "network", late_command(is_copy=False)),
    *(Kind(f"retriever: {how}", "content", hostile(how)) for how in HOSTILE),
    *(Kind(f"transfer: {how}", "transfer", transfer(how)) for how in TRANSFERS),
    Kind("spoiled copy", "transfer", spoiled_copy),
    Kind("full disk worker", "transfer", full_disk("worker")),
    Kind("pause objects", "objects", pause("objects")),
    *(Kind(f"{how_many} told to leave", "elastic", leave(how_many)) for how_many in ("one", "all")),
    Kind("one gone without notice", "elastic", kill("worker")),
    Kind("flushed", "forgetful", flushed),
    Kind("evicted from a kept pool", "forgetful", evicted_from_kept_pool),
    Kind("another schema", "forgetful", another_schema),
)
