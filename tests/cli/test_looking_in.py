"""The operator's commands on a buffer with something in it, and every redis-cli line of the docs."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from cusearch_async.cli import buckets
from cusearch_async.config import load_config
from cusearch_async.lifecycle.children import start_child
from cusearch_async.run.identity import Identity
from cusearch_async.transport.buffer import open_buffer
from cusearch_async.transport.codec import encode
from cusearch_async.transport.interface import MethodState, WorkerStatus
from cusearch_async.transport.server import find_redis_server, is_listening, own_server, redis_cli_line
from cusearch_async.types import Trajectory
from tests.conftest import free_port, wait_until
from tests.fakes import STARTER
from tests.strategies import make_trajectory

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def overrides(redis_url, request):
    return ["--run.name", f"look-{abs(hash(request.node.name))}", "--redis.url", redis_url]


@pytest.fixture
def config(atlas_config, overrides):
    """A run with two trajectories of depth 1 and 3 in the buffer, and one ticket leased."""
    config = load_config(atlas_config, overrides)
    asyncio.run(fill(config))
    return config


async def fill(config):
    async with open_buffer(config, identity=Identity({"run.seed": "0", "method.name": "'[bold]'"})) as open_:
        await open_.recover(0, MethodState(fields={"phase": 2}))
        await open_.announce(0, "v000000-e1")
        await open_.admit("w", 0, 6)
        await open_.heartbeat("w", [0, 1], WorkerStatus(version=0, in_flight=4, episodes=2, busy_s=2, sampled_tokens=9))
        await open_.put(readable(0, 0, depth=1, reward=0.2))
        await open_.put(readable(0, 1, depth=3, reward=1.0, question="Where is Lima?"))


@cache
def starters_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(STARTER)


def readable(ticket: int, rollout: int, **changes) -> Trajectory:
    """With the starter's own tokens, so that it can be read."""

    tokenizer = starters_tokenizer()
    texts = [
        "Question: x",
        "<think>I look.</think><search>Lima</search>",
        "<information>Lima is in Peru.</information>",
    ]
    texts.append("<answer>Peru</answer>")
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    mask = np.concatenate([np.full(len(part), place in (1, 3)) for place, part in enumerate(ids)])
    count = int(mask.sum())
    return replace(
        make_trajectory(ticket, rollout, **changes),
        token_ids=np.concatenate(ids).astype(np.int32),
        sampled=mask,
        logprobs=np.linspace(-4, -0.1, count, dtype=np.float32),
        versions=np.zeros(count, np.int32),
    )


def text_of(renderable) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(renderable)
    return console.file.getvalue()


async def test_buckets_show_depth_by_staleness_groups_workers_and_ledger(atlas_config, overrides):
    config = load_config(atlas_config, overrides)
    await fill(config)
    async with open_buffer(config) as open_:
        now = await buckets.look(open_)
        shown = text_of(buckets.view(now, None, config))
    assert re.search(r"1\s+1\s+·", shown), "one of depth 1, fresh"
    assert "phase 2" in shown
    assert "2 of 768" in shown
    assert re.search(r"pool 0\s+0 of 64 ready", shown)
    assert "trains on" not in shown
    assert "finished 2 = buffered 2 + claimed 0 + trained 0 + unselected 0 + quarantined 0 + lost 0   closes" in shown
    assert re.search(r"w\s+\d+ s ago\s+0\s+4", shown)


def test_without_a_terminal_buckets_are_shown_once(config, atlas_config, overrides, cusearch):
    """In a pipe or a file nothing was shown, for ever."""
    status, shown = cusearch("buckets", atlas_config, *overrides)
    assert (status, "phase 2" in shown, "2 of 768" in shown) == (0, True, True)


def test_a_view_in_json_has_all_of_it(config, atlas_config, overrides, cusearch):
    shown = json.loads(cusearch("buckets", atlas_config, "--once", "--json", *overrides)[1])
    assert [sum(counts) for counts in shown["depth_by_staleness"]] == [0, 1, 0, 1, 0, 0]
    assert (shown["state"]["fields"], shown["pool"], shown["queues"]["leased"]) == ({"phase": 2}, 0, 2)
    assert (shown["ledger"]["finished"], shown["workers"]["w"]["in_flight"]) == (2, 4)


async def test_while_a_pool_is_trained_on_buckets_count_the_next_one(atlas_config, overrides):
    small = ["--pool.questions", "2", "--pool.rollouts", "2", "--method.budget", "4", "--loss.minibatch", "4"]
    config = load_config(atlas_config, [*overrides, *small])
    async with open_buffer(config, identity=Identity({"run.seed": "0"})) as open_:
        await open_.recover(0)
        await open_.announce(0, "v000000-e1")
        for slot in await open_.admit("w", 0, 8):
            await open_.put(make_trajectory(slot.ticket, slot.rollout))
        assert re.search(r"pool 0\s+2 of 2 ready", text_of(buckets.view(await buckets.look(open_), None, config)))
        pool = await open_.claim(0)
        shown = text_of(buckets.view(await buckets.look(open_), None, config))
        assert re.search(r"trains on\s+pool 0", shown)
        assert re.search(r"pool 1\s+2 of 2 ready", shown)
        await open_.commit(pool, pool.trajectories)
        shown = text_of(buckets.view(await buckets.look(open_), None, config))
        assert "trains on" not in shown
        assert re.search(r"pool 1\s+2 of 2 ready", shown)


@pytest.mark.parametrize(
    ("arguments", "ids"),
    [
        ([], ["0:0", "0:1"]),
        (["--depth", "3"], ["0:1"]),
        (["--text", "lima"], ["0:1"]),
        (["--max-reward", "0.5"], ["0:0"]),
        (["--min-reward", "0.5"], ["0:1"]),
        (["--min-staleness", "1"], []),
        (["--limit", "1"], ["0:0"]),
    ],
)
def test_ls_filters(config, atlas_config, overrides, arguments, ids, cusearch):
    shown = cusearch("buffer", "ls", atlas_config, *overrides, *arguments)[1]
    assert re.findall(r"^(\d+:\d+)", shown, re.MULTILINE) == ids


def test_peek_shows_turns_passages_mask_and_logprobs(config, atlas_config, overrides, cusearch):
    shown = cusearch("buffer", "peek", atlas_config, "0:1", *overrides)[1]
    for part in ("0:1, buffered, by w", "<search>Lima</search>", "environment", "masked", "trained on"):
        assert part in shown
    assert "Lima is in Peru." in shown
    assert "mean log-probability -" in shown


def test_export_writes_every_field(config, atlas_config, overrides, tmp_path, cusearch):
    path = tmp_path / "out.jsonl"
    assert cusearch("buffer", "export", atlas_config, *overrides, "--output", path, "--depth", "1") == (0, "")
    (row,) = [json.loads(line) for line in path.read_text().splitlines()]
    arrays = {"token_ids": np.int32, "sampled": np.bool_, "logprobs": np.float32, "versions": np.int32}
    back = {n: np.array(v, arrays[n]) if n in arrays else tuple(v) if n == "answers" else v for n, v in row.items()}
    assert encode(Trajectory(**back)) == encode(readable(0, 0, depth=1, reward=0.2))


def test_quarantine_and_requeue_change_what_they_say(config, atlas_config, overrides, cusearch, tmp_path):
    arguments = [atlas_config, *overrides]
    assert cusearch("buffer", "quarantine", arguments[0], "0:1", *overrides, "--reason", "odd")[0] == 0
    assert "0:1  odd" in cusearch("buffer", "quarantine", *arguments)[1]
    files = (arguments[0], tmp_path / "empty.toml")
    files[1].write_text("")
    assert "0:1  odd" in cusearch("buffer", "quarantine", *files, *overrides)[1]
    assert "0:1, quarantined" in cusearch("buffer", "peek", *files, "0:1", *overrides)[1]
    assert "--reason needs the id of a trajectory" in cusearch("buffer", "quarantine", *arguments, "--reason", "x")[0]
    assert "0:1, quarantined" in cusearch("buffer", "peek", arguments[0], "0:1", *overrides)[1]
    assert cusearch("buffer", "requeue", arguments[0], "1", *overrides)[0] == 0


def test_the_ledger_command_counts_the_keys_unless_it_is_to_be_quick(config, atlas_config, overrides, cusearch):
    def ledger(*arguments: str) -> tuple[object, str]:
        return cusearch("buckets", atlas_config, "--ledger", *overrides, *arguments)

    async def change(act) -> None:
        async with open_buffer(config) as open_:
            await act(open_.connection.client, open_.keys)

    status, shown = ledger()
    assert status == 0
    assert "2 trajectories in Redis, with those of trained pools that a checkpoint may need: counted" in shown
    status, shown = ledger("--json")
    assert (status, json.loads(shown)["closes"]) == (0, True)
    asyncio.run(change(lambda client, keys: client.delete(keys.trajectory("0:1"))))
    assert ledger("--quick")[0] == 0, "the counters do not know"
    status, shown = ledger()
    assert (status, "missing, and not counted as lost: 1 (0:1)" in shown) == (1, True)
    status, shown = ledger("--json")
    assert (status, json.loads(shown)["audit"]["kept"]) == (1, 2)
    asyncio.run(change(lambda client, keys: client.hincrby(keys.ledger, "finished", 1)))
    status, shown = ledger()
    assert (status, "DOES NOT CLOSE" in shown) == (1, True)


def test_pause_and_resume(config, atlas_config, overrides, cusearch):
    for command, paused in (("pause", True), ("resume", False)):
        assert cusearch("buffer", command, atlas_config, *overrides)[0] == 0

        async def is_paused():
            async with open_buffer(config) as open_:
                return (await open_.state()).paused

        assert asyncio.run(is_paused()) is paused


def test_a_run_that_no_learner_has_started_cannot_be_paused(atlas_config, redis_url, cusearch):
    settings = ["--redis.url", redis_url, "--run.name", "atlass"]
    assert "has no run 'atlass'; it has " in cusearch("buffer", "pause", atlas_config, *settings)[0]
    config = load_config(atlas_config, settings)

    async def state():
        async with open_buffer(config) as open_:
            return await open_.connection.client.exists(open_.keys.state)

    assert not asyncio.run(state()), "nor is it made"


def test_workers_are_listed_without_the_contract(config, atlas_config, overrides, cusearch):
    shown = cusearch("buckets", atlas_config, "--workers", *overrides)[1]
    assert re.search(r"w\s+\d+ s ago", shown)
    assert "run.seed" not in shown


def test_the_contract_that_a_worker_must_have_is_listed(config, atlas_config, overrides, cusearch):
    shown = cusearch("buckets", atlas_config, "--contract", "--run.seed", "7", *overrides)[1]
    assert re.search(r"contract\s+method\.name '\[bold\]'\s+run\.seed    0\s*$", shown), shown


@pytest.mark.parametrize("page", ["redis.md"])
def test_the_redis_cli_lines_of_the_docs_can_be_pasted(atlas_config, tmp_path, monkeypatch, page):
    """Into a shell, on a run called atlas with ticket 0 in the buffer; each line must answer, and not with nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUSEARCH_REDIS_PASSWORD", raising=False)
    config = load_config(atlas_config, ["--redis.url", f"redis://127.0.0.1:{free_port()}/0"])
    server = start_child(own_server(config.redis, config.folder), log_file=tmp_path / "log")
    try:
        wait_until(lambda: is_listening(config.redis.url), 20)
        asyncio.run(fill(config))
        lines = redis_cli_lines(page)
        assert len(lines) >= 7
        answers = pasted(lines, config.redis.url)
    finally:
        server.kill()
        server.wait()
    empty = ("ready'", "requeue' 0 -1", "pool:0' 0 -1", "quarantine'")  # of this little run
    for line, answer in zip(lines, answers, strict=True):
        silent = line.startswith(("export", "ID=")) or line.partition("#")[0].strip().endswith(empty)
        assert silent or answer, line
        assert not re.search(r"(?m)^\(?(error|ERR|NOAUTH|NOPERM|WRONG|Warning|AUTH)", answer), answer


def redis_cli_lines(page):
    """The lines of the block of a page that has redis-cli in it."""
    blocks = re.findall(r"^```\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if "redis-cli" in block)
    return [line for line in block.splitlines() if line.strip() and not line.startswith("#")]


def pasted(lines, url):
    """What a shell answers to each line. The docs speak of the usual port, this Redis has another."""
    script = [f'redis-cli() {{ command redis-cli -p {url.split(":")[2].split("/")[0]} "$@"; }}']
    for line in lines:
        script += [line, "echo ====="]
    env = os.environ | {"PATH": f"{find_redis_server().parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash"], input="\n".join(script), capture_output=True, text=True, check=True, env=env)
    assert not done.stderr
    return [answer.strip() for answer in done.stdout.split("=====\n")[:-1]]


@pytest.mark.parametrize("columns", ["80", "200"])
def test_buckets_prints_the_line_that_looks_in(config, atlas_config, overrides, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    asyncio.run(buckets.show(config, once=True))
    shown = capsys.readouterr().out
    assert f"inspect it with: {redis_cli_line(config.redis, config.folder)}" in shown
