"""What an alarm sets off in a run: its log, its hooks, its end."""

from __future__ import annotations

import asyncio
import json
import sys
import threading

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from cusearch_async.config import load_config
from cusearch_async.errors import ConfigError, Fenced, NonFiniteUpdate, StoppedByAlarm
from cusearch_async.files import append_row
from cusearch_async.metrics.files import read_metrics
from cusearch_async.run.identity import Difference
from cusearch_async.training import alarms as module
from cusearch_async.training import takeover
from cusearch_async.training.alarms import AlarmWatch
from tests.conftest import SLOW, wait_until
from tests.training.test_takeover import Buffer, Scene
from tests.training.test_train import setting, start

__all__ = ["setting"]

SEARCHES, NONE = {"depth/mean": 3.0}, {"depth/mean": 0.0}


def watch(atlas_config, tmp_path, *overrides) -> AlarmWatch:
    return AlarmWatch(load_config(atlas_config, ["--run.folder", str(tmp_path), *overrides]), 1, 0)


async def test_a_command_is_run_once_when_an_alarm_begins(atlas_config, tmp_path, caplog):
    told = tmp_path / "told"
    code = "import sys; open(sys.argv[1], 'a').write(sys.argv[2] + chr(10))"
    command = f'["{sys.executable}", "-c", "{code}", "{told}", "{{name}} {{step}}: {{text}}"]'
    found = watch(atlas_config, tmp_path, "--alarms.command", command)
    firing = [found.look(step, row) for step, row in enumerate([SEARCHES, SEARCHES, NONE, NONE, NONE, NONE])]
    await found.finish()
    assert [[alarm.rule.name for alarm in of_step] for of_step in firing[:2]] == [[], []]
    assert [alarm.rule.name for alarm in firing[-1]] == ["stops_searching"]
    (line,) = told.read_text().splitlines()
    assert line.startswith("stops_searching 3: stops_searching at step 3: ")
    assert f"cusearch trace {tmp_path} --step 3" in line
    assert caplog.text.count("alarm stops_searching at step") == 1


@pytest.mark.parametrize("by_proxy", [False, True])
async def test_an_alarm_is_posted_as_json(atlas_config, tmp_path, monkeypatch, by_proxy):
    """Also where the Internet is behind a proxy, which does not reach this machine."""
    got = []

    async def take(request: web.Request) -> web.Response:
        got.append(await request.json())
        return web.Response()

    application = web.Application()
    application.add_routes([web.post("/hook", take)])
    async with TestServer(application) as server:
        monkeypatch.setenv("http_proxy", str(server.make_url("/")) if by_proxy else "http://127.0.0.1:9")
        url = "http://chat.example/hook" if by_proxy else str(server.make_url("/hook"))
        found = watch(atlas_config, tmp_path, "--alarms.url", url)
        for step, row in enumerate([SEARCHES, NONE, NONE, NONE]):
            found.look(step, row)
        await found.finish()
    (one,) = got
    assert (one["name"], one["run"]) == ("stops_searching", str(tmp_path))


@pytest.mark.parametrize("url", ["ANSWERS/SECRET", "http://:SECRET"])
async def test_a_hooks_address_is_in_no_log(atlas_config, tmp_path, caplog, url):
    """It may be a key, as that of a webhook is; no page shows it."""
    async with TestServer(web.Application()) as server:
        hook = url.replace("ANSWERS", str(server.make_url("")))
        await module.bounded(module.post(hook, {}), "stops_searching")
    assert "the hook of alarm stops_searching failed: alarms.url: " in caplog.text
    assert "SECRET" not in caplog.text
    assert "SECRET" not in str(Difference("alarms.url", hook, "'https://x/SECRET'"))


async def test_what_a_new_learner_sets_aside_is_no_trouble(atlas_config, tmp_path):
    row = {"buffer/lost": 0.0, "buffer/quarantined": 0.0}
    for step in range(3):
        append_row(tmp_path / "metrics.jsonl", {"step": step, "epoch": 1, **row})
    config = load_config(atlas_config, ["--run.folder", str(tmp_path)])
    found = AlarmWatch(config, 2, 3)
    assert found.look(3, row | {"buffer/quarantined": 7.0}) == []
    assert [alarm.rule.name for alarm in found.look(4, row | {"buffer/quarantined": 8.0})] == ["trajectories_lost"]


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (("--alarms.command", '["/does/not/exist"]'), "failed: [Errno 2]"),
        (("--alarms.command", f'["{sys.executable}", "-c", "raise SystemExit(3)"]'), "ended with status 3"),
        (("--alarms.command", f'["{sys.executable}", "-c", "import time; time.sleep(60)"]'), "took more than 1 s"),
        (("--alarms.url", "http://127.0.0.1:9/hook"), "failed: Cannot connect"),
    ],
)
async def test_a_hook_that_fails_or_hangs_is_logged_and_holds_nothing(
    atlas_config, tmp_path, caplog, monkeypatch, hook, said
):
    monkeypatch.setattr(module, "HOOK_S", 1.0 if "more than" in said else 60.0)
    found = watch(atlas_config, tmp_path, *hook)
    for step, row in enumerate([SEARCHES, NONE, NONE, NONE]):
        found.look(step, row)
    await asyncio.wait_for(found.finish(), 30 * SLOW)
    (line,) = [record.message for record in caplog.records if record.message.startswith("the hook of alarm")]
    assert line.startswith("the hook of alarm stops_searching ")
    assert said in line


async def test_a_resumed_run_remembers_the_steps_before(setting):
    s = setting("--run.steps", "3")
    await start(s)
    assert len(read_metrics(s.config.folder / "metrics.jsonl")) == 3
    assert len(AlarmWatch(s.config, 1, 2)._rows) == 2, "the row of the step that is made again does not count"


async def test_a_step_that_is_refused_keeps_the_checkpoint_before(setting):
    """It was thrown away while it was written, with the steps before it, and again after each restart."""
    s, refused = setting(), threading.Event()
    update, capture = s.learner.update, s.learner.capture

    def update_or_refuse(selected, advantages, step):
        if step == 2:
            refused.set()
            raise NonFiniteUpdate("step 2 is refused, not finite: the gradient")
        return update(selected, advantages, step)

    def capture_for_a_slow_disk(folder):
        write = capture(folder)
        return lambda: (refused.wait(20 * SLOW), write())

    s.learner.update, s.learner.capture = update_or_refuse, capture_for_a_slow_disk
    with pytest.raises(NonFiniteUpdate, match="their pool stays claimed"):
        await start(s)
    assert [path.name for path in s.checkpoints.folder.glob("step*")] == ["step000002-e1"]


async def test_a_run_ends_at_an_alarm_of_stop_on_and_keeps_the_checkpoint_before(setting):
    """All rewards of the model run are equal; without the setting it makes its three steps."""
    s = setting("--alarms.stop_on", '["large_gradient"]')
    update = s.learner.update
    s.learner.update = lambda *given: update(*given) | {"train/grad_norm": 1e9 if given[2] == 2 else 0.5}
    metrics, capture = s.config.folder / "metrics.jsonl", s.learner.capture

    def capture_for_a_slow_disk(folder):
        """The checkpoint is not written when the alarm fires; it was thrown away then."""
        write = capture(folder)
        return lambda: (wait_until(lambda: len(read_metrics(metrics)) == 3, 20), write())

    s.learner.capture = capture_for_a_slow_disk
    with pytest.raises(StoppedByAlarm, match=r"large_gradient at step 2.*continues from its newest checkpoint"):
        await start(s)
    rows = read_metrics(metrics)
    assert [row["alarms/firing"] for row in rows] == [0.0, 0.0, 1.0], "the row that tells why is written"
    assert [path.name for path in s.checkpoints.folder.glob("step*")] == ["step000002-e1"]
    assert not s.run.state.is_finished


@pytest.mark.parametrize(
    ("setting_and_value", "said"),
    [
        (("--alarms.stop_on", '["stop_searching"]'), "'stop_searching' is no alarm; did you mean stops_searching"),
        (("--alarms.command", '["notify", "{texts}"]'), "'{texts}' cannot be filled in; use {name}, {text}"),
        (("--alarms.command", '["notify", "{"]'), "'{' cannot be filled in"),
        (("--alarms.url", "ftp://x"), "alarms.url"),
    ],
)
def test_settings_that_cannot_be_are_refused(atlas_config, setting_and_value, said):
    with pytest.raises(ConfigError, match="alarms") as error:
        load_config(atlas_config, setting_and_value)
    assert said in str(error.value)


@pytest.mark.parametrize("error", [NonFiniteUpdate("it is\nrefused"), Fenced("another learner has taken over")])
def test_hooks_are_told_of_an_error_that_ends_the_run(atlas_config, tmp_path, error, monkeypatch):
    """No alarm could: a step that fails has no row. A run that another learner continues has not ended."""
    monkeypatch.setattr(takeover, "BEAT_S", 0.1)
    told, code = tmp_path / "told", "import sys; open(sys.argv[1], 'a').write(sys.argv[2])"
    command = json.dumps([sys.executable, "-c", code, str(told), "{name} {step} {text}"])
    s = Scene(atlas_config, tmp_path / "run", "--alarms.command", command)

    def refuse(step):
        raise error

    s.lead()
    s.config = s.config.model_copy(update={"run": s.config.run.model_copy(update={"steps": 5})})
    s.buffer = Buffer(s.run, s.config, s.events)
    s.learner.at_update = refuse
    with pytest.raises(type(error)):
        s.lead()
    has_ended = isinstance(error, NonFiniteUpdate)
    assert told.exists() == has_ended
    if has_ended:
        assert told.read_text().startswith("run_ended 2 atlas has ended in step 2: it is")
