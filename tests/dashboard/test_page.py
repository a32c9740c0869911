"""The page of a run: its data, what no text of a model can do to it, and its server."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from yarl import URL

from cusearch_async.cli.dashboard import shown
from cusearch_async.config import save_config
from cusearch_async.dashboard.facts import facts
from cusearch_async.dashboard.kept import KeptRun, names_of
from cusearch_async.dashboard.page import VENDOR, as_script, asset, page, write_page
from cusearch_async.dashboard.server import LOOK_EVERY_S, Sent, Shown, application
from cusearch_async.errors import ConfigError
from cusearch_async.evaluation.scores import record
from cusearch_async.run.history import record_stop
from tests.conftest import SLOW
from tests.dashboard.browser import CHROMIUM, in_browser
from tests.dashboard.conftest import add_step, data_of
from tests.strategies import make_trajectory

CHECKSUMS = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
HOSTILE = (
    "</script><script>document.documentElement.id = 'broken'</script>\u2028\u202e"
    "<img src=x onerror='document.documentElement.id = \"broken\"'> & \x00"
)


def test_the_library_of_the_charts_is_the_one_that_was_released():
    for name, checksum in CHECKSUMS.items():
        assert hashlib.sha256(asset("vendor", name).encode()).hexdigest() == checksum
    assert set(CHECKSUMS) == set(VENDOR)
    assert "MIT" in asset("vendor", "uPlot.LICENSE")


@given(st.text())
def test_no_text_ends_the_script_that_holds_the_data(text):
    found = as_script({text: [text]})
    assert json.loads(found) == {text: [text]}
    assert found.isascii()
    assert not set("<>&") & set(found)


def test_the_page_names_what_may_run(config):
    text = page(HOSTILE, {"screens": ["episodes"], "x": HOSTILE})
    assert data_of(text)["x"] == HOSTILE
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    (nonce,) = re.findall(r"script-src 'nonce-([\w-]+)'", policy)
    assert "default-src 'none'" in policy
    assert text.count("<script") == 2
    assert f'<script nonce="{nonce}">' in text
    assert page("t", {}) != page("t", {}), "each page has another nonce"


def get(config, *paths: str, headers: dict[str, str] | None = None) -> list[tuple[int, str]]:
    """Status and text of each path, of a server that shows the run `demo`."""

    async def ask() -> list[tuple[int, str]]:
        async with TestClient(TestServer(application({"demo": Shown(config.folder, config)}))) as client:
            found = []
            for path in paths:
                async with client.get(path, headers=headers) as answer:
                    found.append((answer.status, await answer.text()))
            return found

    return asyncio.run(ask())


def test_the_server_shows_the_page_and_says_what_it_cannot_see(config):
    add_step(config, 0)
    (status, text), (missing, _), (no_step, why), (front, _) = get(config, "/demo/", "/other/", "/demo/step/0", "/")
    assert status == front == 200
    data = data_of(text)
    assert data["watches"]
    assert "cannot be reached" in data["live"]["problem"]
    assert missing == 404
    assert no_step == 404
    assert "has no record of step 0" in json.loads(why)["error"]


ALIVE, SILENT = ({"name": name, "is_alive": name == "a"} for name in "ab")
SILENCE = {"name": "worker_silent", "text": "b was last heard of 90 s ago"}
WELL = {"troubles": [], "workers": [ALIVE], "state": {"finished": False}}


@pytest.mark.parametrize(
    ("now", "wrong"),
    [
        (WELL, None),
        (WELL | {"workers": [ALIVE, SILENT], "troubles": [SILENCE]}, None),
        (WELL | {"workers": [SILENT], "troubles": [SILENCE]}, "no worker is alive"),
        (WELL | {"workers": [SILENT], "troubles": [SILENCE], "state": {"finished": True}}, None),
        (WELL | {"workers": []}, "no worker is alive"),
        (WELL | {"troubles": [{"name": "no_learner", "text": "no learner is alive"}]}, "no learner is alive"),
        ({"problem": "Redis cannot be reached"}, "Redis cannot be reached"),
        (None, "not looked into"),
    ],
)
def test_health_is_a_status_for_orchestrators(config, monkeypatch, now, wrong):
    async def seen(_: Shown) -> dict[str, Any] | None:
        return now

    monkeypatch.setattr(Shown, "now", seen)
    ((status, text),) = get(config, "/demo/healthz")
    assert status == (503 if wrong else 200)
    assert (wrong or "") in " ".join(json.loads(text)["wrong"])
    assert bool(json.loads(text)["wrong"]) is bool(wrong)


def test_a_run_that_is_finished_is_well_without_its_redis(config):
    add_step(config, 9)
    assert get(config, "/demo/healthz")[0][0] == 503
    record_stop(config.folder, 1, 10, "finished")
    assert get(config, "/demo/healthz") == [(200, '{"wrong": []}')]


def test_prometheus_gets_the_newest_step_and_the_alarms(config):
    for step, depth in enumerate([3.0, 3.0, 0.1, 0.1]):
        own = {"environment/web-a/em": 0.5, "environment/web_a/em": 0.75}
        add_step(config, step, **{"depth/mean": depth, "by_depth/em": [0.5, None, 0.25, None, None, None]}, **own)
    ((status, text),) = get(config, "/demo/metrics")
    assert status == 200
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["cusearch_depth_mean", ("run", "demo")] == 0.1
    assert found["cusearch_by_depth_em", ("depth", "2"), ("run", "demo")] == 0.25
    assert ("cusearch_by_depth_em", ("depth", "1"), ("run", "demo")) not in found
    for label, em in (("web-a", 0.5), ("web_a", 0.75)):
        assert found["cusearch_environment_em", ("environment", label), ("run", "demo")] == em
    assert found["cusearch_alarm", ("alarm", "stops_searching"), ("run", "demo")] == 1


def test_a_folder_that_is_gone_is_named(config):
    shutil.rmtree(config.folder)
    ((status, text),) = get(config, "/demo/")
    assert status == 503
    assert "not the folder of a run" in text


def test_news_are_the_steps_that_the_page_does_not_have_yet(config):
    add_step(config, 0)

    async def listen() -> list[dict[str, Any]]:
        async with (
            TestClient(TestServer(application({"demo": Shown(config.folder, config)}))) as client,
            client.get("/demo/events?from=0") as stream,
        ):

            async def news() -> dict[str, Any]:
                while not (read := await asyncio.wait_for(stream.content.readline(), 30 * SLOW)).startswith(b"data: "):
                    pass
                return json.loads(read.removeprefix(b"data: "))

            first = await news()
            add_step(config, 1)
            add_step(config, 2)
            while "rows" not in (then := await news()):
                pass
            return [first, then]

    first, then = asyncio.run(listen())
    assert first["rows"]["step"] == [0]
    assert then["rows"]["step"] == [1, 2]
    assert then["progress"]["done"] == 3
    assert "problem" in then["live"]


def news_of(config, *steps_made: tuple[int, int], have: int, last: str) -> dict[str, Any]:
    """The news of a browser that has `have` steps, of a run with rows (epoch, step)."""
    for epoch, step in steps_made:
        add_step(config, step, epoch=epoch)
    return Sent(have, last).news(KeptRun.read(config.folder))


@pytest.mark.parametrize(
    ("have", "last", "steps", "is_reset"),
    [
        (0, "", [0, 1, 2, 3], False),
        (2, "1.1", [2, 3], False),
        (3, "1.2", [0, 1, 2, 3], True),
        (4, "2.3", None, False),
        (9, "1.8", [0, 1, 2, 3], True),
    ],
)
def test_a_browser_gets_what_it_lacks_and_all_when_steps_were_made_again(config, have, last, steps, is_reset):
    """The learner of epoch 2 went back to step 2."""
    news = news_of(config, (1, 0), (1, 1), (1, 2), (1, 3), (2, 2), (2, 3), have=have, last=last)
    assert news.get("rows", {}).get("step") == steps
    assert news.get("reset", False) == is_reset
    assert news["last"] == "2.3"


def test_what_has_not_changed_is_not_sent_again(config):
    add_step(config, 0)
    sent = Sent(0, "")
    assert "settings" in sent.news(KeptRun.read(config.folder))
    add_step(config, 1)
    assert not {"settings", "rules", "starts", "scores"} & sent.news(KeptRun.read(config.folder)).keys()


def test_runs_are_listed_by_names_that_can_be_addresses(config, tmp_path):
    add_step(config, 0)
    strange = tmp_path / "a#b%41 ü?c:d"
    shutil.copytree(config.folder, strange)
    (tmp_path / "empty").mkdir()
    shown = {"demo": config.folder, strange.name: strange, "empty": tmp_path / "empty"}
    runs = {name: Shown(folder, None) for name, folder in shown.items()}

    async def ask() -> list[Any]:
        async with TestClient(TestServer(application(runs))) as client:
            listed = await (await client.get("/runs.json")).json()
            return [listed, *[(await client.get(URL(one["address"], encoded=True))).status for one in listed[:2]]]

    (demo, odd, empty), *statuses = asyncio.run(ask())
    assert statuses == [200, 200]
    assert (demo["name"], odd["name"]) == ("demo", strange.name)
    assert "not the folder of a run" in empty["problem"]


def test_the_address_of_a_run_may_lack_its_last_slash(config):
    async def ask(path: str) -> tuple[int, str]:
        async with (
            TestClient(TestServer(application({"demo": Shown(config.folder, None)}))) as client,
            client.get(path) as answer,
        ):
            return answer.status, answer.url.raw_path_qs

    assert asyncio.run(ask("/demo?token=x")) == (200, "/demo/?token=x")
    assert asyncio.run(ask("/other"))[0] == 404


def test_equal_names_are_numbered_and_none_is_lost():
    assert names_of([Path("/x-2"), Path("/x"), Path("/y/x")]) == ["x-2", "x", "x-3"]


def test_a_page_is_written_without_the_episodes_that_cannot_be_read(config, tmp_path, caplog):
    add_step(config, 0)
    (config.folder / "records").mkdir()
    (config.folder / "records" / "000000-e1.zz").write_bytes(b"damaged")
    write_page(config.folder, tmp_path / "page.html")
    assert data_of((tmp_path / "page.html").read_text())["groups"] is None
    assert "the page has no episodes: " in caplog.text


def test_a_folder_that_is_no_runs_is_refused_at_once(tmp_path):
    """`cusearch dashboard runs` began to serve a page that could not be shown."""
    with pytest.raises(ConfigError, match="is not the folder of a run; give one like runs/demo"):
        shown(tmp_path, [])


def test_a_config_of_another_version_leaves_only_redis_out(config, caplog):
    settings = config.folder / "config.toml"
    settings.write_text(settings.read_text() + "\n[of_tomorrow]\nx = 1\n")
    run = shown(config.folder, [])
    assert run.config is None
    assert "its Redis is not looked into" in caplog.text
    assert run.make(facts)["about"]["method"] == "sdga_phase"


def test_the_redis_of_a_folder_is_asked_with_the_password_in_it(config, tmp_path, monkeypatch):
    """The config of a run that was started in another folder says `runs/demo`."""
    relative = config.model_copy(update={"run": config.run.model_copy(update={"folder": Path("runs/demo")})})
    save_config(relative, config.folder / "config.toml")
    monkeypatch.chdir(tmp_path)
    assert shown(config.folder, []).config.folder == config.folder


def test_a_browser_that_listens_does_not_hold_the_server(config):
    add_step(config, 0)

    async def listen_and_close() -> float:
        server = TestServer(application({"demo": Shown(config.folder, config)}))
        async with TestClient(server) as client, client.get("/demo/events") as stream:
            await stream.content.readline()
            began = time.monotonic()
            await server.close()
            return time.monotonic() - began

    assert asyncio.run(listen_and_close()) < LOOK_EVERY_S * SLOW


@pytest.mark.system
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: `make setup-browser` installs it")
@pytest.mark.parametrize("size", ["1280,1000", pytest.param("500,900", marks=pytest.mark.slow)])
def test_every_screen_is_drawn_in_a_browser_without_an_error_and_texts_stay_texts(config, tmp_path, size):
    for step in range(4):
        add_step(config, step, **{"by_depth/reward": [0.1, 0.2, None, None, None, 0.5], "train/kl_reference": 0.1})
    record_stop(config.folder, 1, None, HOSTILE)
    episode = {"right": False, "depth": 1, "prediction": HOSTILE, "advantage": None, "summary": HOSTILE}
    episode |= {"parts": [["model", [["search", HOSTILE], ["", HOSTILE]]]]}
    group = {"number": "0", "question": HOSTILE, "gold": HOSTILE, "taught": 0.0, "episodes": [episode]}
    for version, em in ((1, (0.0, 1.0)), (2, (1.0, 0.0))):
        episodes = [make_trajectory(n, 0, em=one, depth=n, question_id=f"{n}{HOSTILE}") for n, one in enumerate(em)]
        record(config.folder, version, f"v{version:06d}-e1", 1.0, {}, episodes)
    add_step(config, 4, **{"train/loss": math.nan, "train/grad_norm": 99.0, "train/kl_reference": 9.0})
    data = facts(KeptRun.read(config.folder)) | {"watches": False, "recorded": [0]}
    assert {one["name"] for one in data["alarms"]} == {"drifts", "large_gradient"}
    data["healthy"] = {"reward/all": {"low": [0.1] * 4, "high": [0.9] * 4}}
    data["groups"] = {"step": 0, "colours": {HOSTILE: "search"}, "groups": [group]}
    screens = re.findall(r'^  (\w+): \["', asset("page.js"), re.MULTILINE)
    assert screens.pop() == "runs"
    assert len(screens) == 8
    file = tmp_path / "page.html"
    file.write_text(page(HOSTILE, data), encoding="utf-8")
    for screen in screens:
        dom = in_browser(f"{file.as_uri()}#{screen}", tmp_path, size)
        assert "<section" in dom, screen
        assert '<html lang="en">' in dom, "no text was run"
        assert "<img" not in dom
        drawn = {"heldout": ("By searches made", "gained: 1"), "now": ('class="spark"', "healthy, low")}
        assert all(part in dom for part in drawn.get(screen, ())), screen
