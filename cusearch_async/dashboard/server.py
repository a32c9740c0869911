"""Serves the pages of runs, and their news as server-sent events; nothing of a run waits for it. Who has a run's token
can change it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from aiohttp import web

from cusearch_async.config import Config, make_page_token
from cusearch_async.dashboard.episodes import earlier, groups_of
from cusearch_async.dashboard.facts import SIDES, columns, facts, in_short, last_of
from cusearch_async.dashboard.facts import firing as firing_of
from cusearch_async.dashboard.facts import news as news_of
from cusearch_async.dashboard.kept import KeptRun
from cusearch_async.dashboard.live import Live
from cusearch_async.dashboard.page import page
from cusearch_async.dashboard.prometheus import CONTENT_TYPE, exposition
from cusearch_async.errors import ConfigError, CusearchError, first_line
from cusearch_async.http_server import has_token
from cusearch_async.replay.selection import RecordedStep
from cusearch_async.run.folder import METRICS, SCORES, STARTS, read_marker
from cusearch_async.run.trust import refuse_foreign, settings_in

log = logging.getLogger(__name__)

Json = dict[str, Any]
T = TypeVar("T")
LOOK_EVERY_S = 2.0
LOOK_WITHIN_S = 3.0
_WATCHED = (METRICS, SCORES, STARTS, "records", *(f"eval_{side}.json" for side in SIDES))


class Shown:
    """A run with a page."""

    def __init__(self, folder: Path, config: Config | None, trusts: bool = False) -> None:
        """`config`: to look into its Redis; None where that is not wanted. `trusts`: code that a config in the folder
        names may be imported."""
        self.folder, self.config, self.trusts = folder, config, trusts
        self._kept: KeptRun | None = None
        self._reading = threading.Lock()

    def make(self, what: Callable[[KeptRun], T]) -> T:
        """What `what` makes of the run as its folder is now; one at a time. Raises: ConfigError."""
        with self._reading:
            self._kept = KeptRun.read(self.folder, self._kept)
            return what(self._kept)

    def token(self) -> str | None:
        """That of a request which changes the run; None where none may: its Redis is not looked into, or its folder is
        not this user's to write. Made at the first call."""
        try:
            is_run = self.config is not None and read_marker(self.folder) is not None
            return make_page_token(self.folder) if is_run else None
        except (OSError, ConfigError) as error:
            log.info("%s: the page changes nothing of this run: %s", self.folder, first_line(error))
            return None

    def changed(self) -> tuple[int, ...]:
        """Differs when something that `read` reads has changed."""
        places = (self.folder / name for name in _WATCHED)
        return tuple(place.stat().st_mtime_ns if place.exists() else 0 for place in places)

    async def now(self) -> Json | None:
        if self.config is None:
            return None
        try:
            async with asyncio.timeout(LOOK_WITHIN_S), Live(self.config, self.folder) as live:
                return await live.now()
        except TimeoutError:  # who asks has the figures of the folder within ten seconds, as Prometheus wants
            return {"problem": f"{self.config.redis.place} has not answered for {LOOK_WITHIN_S:g} s"}

    async def change(self, action: str, what: str, reason: str) -> str:
        """As `actions.act`. Raises: ConfigError; BufferUnavailable."""
        if self.config is None:
            raise ConfigError("the Redis of this run is not looked into")
        async with Live(self.config, self.folder) as live:
            return await live.act(action, what, reason)


RUNS = web.AppKey("runs", dict[str, Shown])
CLOSING = web.AppKey("closing", asyncio.Event)
"""Set when the server ends: browsers that listen for news would hold it."""


def application(runs: Mapping[str, Shown]) -> web.Application:
    """`runs` by the names in their addresses."""
    found = web.Application(middlewares=[web.normalize_path_middleware(merge_slashes=False)])  # /NAME is /NAME/
    found[RUNS], found[CLOSING] = dict(runs), asyncio.Event()
    found.on_shutdown.append(close)
    for run in runs.values():  # for who wants to change it
        run.token()
    found.add_routes(
        [
            web.get("/", index),
            web.get("/runs.json", index_data),
            web.get("/{run}/", whole_page),
            web.get("/{run}/events", events),
            web.get("/{run}/metrics", metrics),
            web.get("/{run}/healthz", health),
            web.get(r"/{run}/step/{step:\d{1,9}}", step),
            web.get(r"/{run}/step/{step:\d{1,9}}/earlier", earlier_groups),
            web.post("/{run}/act", change),
        ]
    )
    return found


def runs_of(request: web.Request) -> dict[str, Shown]:
    return request.app[RUNS]


def of_address(request: web.Request) -> Shown:
    run = runs_of(request).get(request.match_info["run"])
    if run is None:
        raise web.HTTPNotFound(text=f"no run {request.match_info['run']!r} is shown here")
    return run


async def close(of: web.Application) -> None:
    of[CLOSING].set()


async def index(request: web.Request) -> web.Response:
    """The list of runs, or the page of the only one."""
    first, *others = runs_of(request)
    if not others:
        raise web.HTTPFound(address_of(first))
    data = {"screens": ["runs"], "runs": await asyncio.to_thread(listed, runs_of(request))}
    return as_html("runs", data)


def as_html(title: str, data: Json) -> web.Response:
    text = page(title, data)
    return web.Response(text=text, content_type="text/html", headers={"Cache-Control": "no-store"})


async def made_of(run: Shown, what: Callable[[KeptRun], T]) -> T:
    """Raises: HTTPServiceUnavailable for a folder that cannot be read."""
    try:
        return await asyncio.to_thread(run.make, what)
    except ConfigError as error:
        raise web.HTTPServiceUnavailable(text=first_line(error)) from error


def address_of(name: str) -> str:
    """The path of a run's page."""
    return f"/{quote(name, safe='')}/"


async def index_data(request: web.Request) -> web.Response:
    return web.json_response(await asyncio.to_thread(listed, runs_of(request)))


def listed(runs: Mapping[str, Shown]) -> list[Json]:
    """One row a run; of a folder that cannot be read, why."""
    rows: list[Json] = []
    for name, run in runs.items():
        try:
            rows.append(run.make(in_short) | {"name": name, "address": address_of(name)})
        except Exception as error:
            rows.append({"name": name, "problem": first_line(error)})
    return rows


async def whole_page(request: web.Request) -> web.Response:
    run = of_address(request)
    found = await made_of(run, facts)
    return as_html(found["name"], found | {"watches": True, "live": await run.now()})


async def events(request: web.Request) -> web.StreamResponse:
    """News for a browser, as long as it listens. It says how many steps it has, and `EPOCH.STEP` of the last."""
    run, known = of_address(request), request.query.get("from", "0")
    sent = Sent(int(known) if known.isdecimal() else 0, request.query.get("last", ""))
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    await response.prepare(request)
    before: tuple[int, ...] = ()
    closing = request.app[CLOSING]
    async with contextlib.AsyncExitStack() as stack:
        live = await stack.enter_async_context(Live(run.config, run.folder)) if run.config else None
        is_last = False
        while not is_last:
            is_last = closing.is_set()
            news: Json = {"live": await live.now() if live and not is_last else None}
            changed = run.changed()
            if changed != before or is_last:
                try:
                    news |= await asyncio.to_thread(run.make, sent.news)
                except ConfigError as error:
                    news["live"] = {"problem": first_line(error)}
                before = changed
            await response.write(f"data: {json.dumps(news, allow_nan=False)}\n\n".encode())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(closing.wait(), 0 if is_last else LOOK_EVERY_S)
    return response


class Sent:
    """What a browser has of a run."""

    def __init__(self, steps: int, last: str) -> None:
        self._steps, self._last = steps, last
        self._texts: dict[str, str] = {}

    def news(self, kept: KeptRun) -> Json:
        """What it does not have. `rows`: steps after those that it has; `reset`: instead of them, where some were made
        again, by a learner that went back to a checkpoint."""
        rows, found = kept.rows, news_of(kept)
        texts = {name: json.dumps(value) for name, value in found.items()}
        fresh = {name: value for name, value in found.items() if self._texts.get(name) != texts[name]}
        has_all = self._steps <= len(rows) and (not self._steps or last_of(rows[: self._steps]) == self._last)
        if not has_all:
            fresh |= {"rows": columns(rows), "reset": True}
        elif rows[self._steps :]:
            fresh["rows"] = columns(rows[self._steps :])
        self._texts, self._steps, self._last = texts, len(rows), last_of(rows)
        return fresh | {"last": self._last, "count": self._steps}


async def metrics(request: web.Request) -> web.Response:
    """For Prometheus."""
    run = of_address(request)
    row, firing = await made_of(run, newest)
    now = await run.now()
    firing += {trouble["name"] for trouble in (now or {}).get("troubles", ())}
    body = exposition(request.match_info["run"], row, firing, now)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


async def health(request: web.Request) -> web.Response:
    """For orchestrators: status 200 where nothing is wrong now, else 503; `wrong` says what."""
    run = of_address(request)
    is_over = (await made_of(run, lambda kept: kept.outcome)).startswith("finished")  # its Redis may have ended with it
    wrong = [] if is_over else ailments(await run.now())
    return web.json_response({"wrong": wrong}, status=503 if wrong else 200)


def ailments(now: Json | None) -> list[str]:
    """`now`: of `Live.now`; None where Redis is not looked into. A worker that is silent while others are alive was
    replaced, or is none's."""
    if now is None or "problem" in now:
        return [now["problem"] if now else "the Redis of this run is not looked into"]
    if now["state"]["finished"]:
        return []
    alive = sum(worker["is_alive"] for worker in now["workers"])
    found = [trouble["text"] for trouble in now["troubles"] if trouble["name"] != "worker_silent"]
    return found if alive else [*found, "no worker is alive: start one"]


def newest(kept: KeptRun) -> tuple[Json, list[str]]:
    """The newest row, and the names of the alarms that fire."""
    return (kept.rows[-1] if kept.rows else {}), firing_of(kept)


async def change(request: web.Request) -> web.Response:
    """{"action": "pause", "what": "", "reason": ""}; with the run's token."""
    run = of_address(request)
    token = run.token()
    if token is None:
        return web.json_response({"error": "this page changes nothing of its run"}, status=403)
    if not has_token(request, token):
        why = "the token is not that of this run: its file page-token, or CUSEARCH_PAGE_TOKEN"
        return web.json_response({"error": why}, status=401)
    try:
        asked = msgspec.json.decode(await request.read(), type=Change)
        done = await asyncio.shield(run.change(asked.action, asked.what.strip(), asked.reason))  # if the browser leaves
        return web.json_response({"done": done})
    except msgspec.MsgspecError as error:
        return web.json_response({"error": first_line(error)}, status=400)
    except CusearchError as error:
        return web.json_response({"error": first_line(error)}, status=409)


class Change(msgspec.Struct, forbid_unknown_fields=True):
    action: str
    what: str = ""
    reason: str = ""


async def step(request: web.Request) -> web.Response:
    return await of_records(request, lambda folder, number: groups_of(RecordedStep.read(folder, number)))


async def earlier_groups(request: web.Request) -> web.Response:
    """Those of the question whose id is `?question=`."""
    question = request.query.get("question", "")
    return await of_records(request, lambda folder, number: {"groups": earlier(folder, question, number)})


async def of_records(request: web.Request, make: Callable[[Path, int], Json]) -> web.Response:
    try:
        run, number = of_address(request), int(request.match_info["step"])
        if not run.trusts:  # a start may have come since the page was opened
            await asyncio.to_thread(lambda: [*map(refuse_foreign, settings_in(run.folder))])
        found = await asyncio.to_thread(make, run.folder, number)
    except ConfigError as error:
        return web.json_response({"error": first_line(error)}, status=404)
    return web.json_response(found)
