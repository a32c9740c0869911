"""A retriever that has a limit: how many searches it is sent, and that none is lost."""

from __future__ import annotations

import asyncio
import gc
import time
from types import SimpleNamespace

import pytest
from aiohttp import web

from cusearch_async.errors import SearchRefused
from cusearch_async.retrieval import pace as module
from cusearch_async.retrieval.pace import Pace
from tests.conftest import SLOW
from tests.http_service import Service, says
from tests.retrieval.retrievers import QUESTION, client_of, finds


class Busy:
    """Answers after `answer_s`; more than `most` requests in `window_s` are refused with 429."""

    def __init__(self, answer_s: float = 0.0, most: int = 10**6, window_s: float = 1.0, **headers: str) -> None:
        self.answer_s, self.most, self.window_s, self.headers = answer_s, most, window_s, headers
        self.answered_at: list[float] = []
        self.refused = self.at_once = self.most_at_once = 0

    async def __call__(self, service: Service, request: web.Request) -> web.StreamResponse:
        now = time.monotonic()
        if sum(now - at < self.window_s for at in self.answered_at[-self.most :]) >= self.most:
            self.refused += 1
            named = {name.replace("_", "-"): value for name, value in self.headers.items()}
            return web.Response(status=429, headers=named)
        self.answered_at.append(now)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(self.answer_s)
        self.at_once -= 1
        return await finds("Lima")(service, request)


async def searches(busy: Busy, count: int, **settings) -> list[object]:
    async with client_of(Service(busy), **settings) as client:
        asked = (client.search(f"capital of country {n}", n, QUESTION, 0) for n in range(count))
        return await asyncio.gather(*asked, return_exceptions=True)


async def test_a_search_that_waits_for_others_does_not_time_out():
    """The wait for one of max_connections counted as the retriever's time."""
    busy = Busy(answer_s=0.1 * SLOW)
    found = await searches(busy, 40, max_connections=2, timeout_s=1.0 * SLOW, outage_s=1.5 * SLOW)
    assert found == [["Lima"]] * 40
    assert len(busy.answered_at) == 40
    assert busy.most_at_once == 2


@pytest.mark.parametrize("headers", [{}, {"Retry_After": "0.3"}])
async def test_a_retriever_with_a_limit_is_asked_no_faster_and_answers_all(headers):
    """After each answer all searches asked again, and some were given up."""
    busy = Busy(most=10, window_s=0.4, **headers)
    found = await searches(busy, 60, outage_s=1.5)
    assert found == [["Lima"]] * 60
    assert busy.refused < 4 * 60


class Clock:
    """Time that passes only while it is slept."""

    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        own = SimpleNamespace(sleep=self.sleep, Event=asyncio.Event, Semaphore=asyncio.Semaphore)
        monkeypatch.setattr(module, "asyncio", own)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


async def pause_of(pace: Pace, clock: Clock) -> float:
    """Seconds until the next request may be made."""
    before = clock.now
    async with pace.one():
        return clock.now - before


@pytest.mark.parametrize(("wanted", "pause_s"), [("7", 7.0), ("3600", 30.0), ("Fri", 0.1)])
async def test_a_refusal_lets_all_wait_as_long_as_the_server_says(clock, wanted, pause_s):
    pace = Pace(4)
    pace.slow_down({"Retry-After": wanted})
    assert await pause_of(pace, clock) == pytest.approx(pause_s)
    assert await pause_of(pace, clock) == 0


async def test_pauses_that_the_server_does_not_name_double_and_an_answer_halves_them(clock):
    pace, pauses = Pace(4), []
    for _ in range(10):
        pace.slow_down({})
        pauses.append(await pause_of(pace, clock))
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0])
    pace.speed_up()
    pace.slow_down({})
    assert await pause_of(pace, clock) == pytest.approx(30.0)
    for _ in range(9):
        pace.speed_up()
    pace.slow_down({})
    assert await pause_of(pace, clock) == pytest.approx(0.117, abs=0.01)


async def at_once(pace: Pace, asked: int) -> int:
    """How many of so many requests are made before the first is answered."""
    begun, answered = [], asyncio.Event()

    async def request() -> None:
        async with pace.one():
            begun.append(None)
            await answered.wait()

    tasks = [asyncio.ensure_future(request()) for _ in range(asked)]
    for _ in range(3):
        await asyncio.get_running_loop().run_in_executor(None, lambda: None)
    count = len(begun)
    answered.set()
    await asyncio.gather(*tasks)
    assert len(begun) == asked
    return count


async def test_refusals_of_one_burst_halve_the_requests_once_and_answers_add_one_a_round(clock):
    pace = Pace(16)
    assert await at_once(pace, 40) == 16
    for _ in range(9):
        pace.slow_down({})
    assert await at_once(pace, 40) == 8
    for _ in range(9):
        pace.speed_up()
    assert await at_once(pace, 40) == 9
    for _ in range(1000):
        pace.speed_up()
    assert await at_once(pace, 40) == 16


async def test_searches_that_are_cancelled_leave_their_places(clock):
    pace = Pace(2)

    async def request() -> None:
        async with pace.one():
            await asyncio.Event().wait()

    pace.slow_down({})  # one at once
    waiting = [asyncio.ensure_future(request()) for _ in range(5)]
    await asyncio.wait(waiting, timeout=0.1 * SLOW)
    for task in reversed(waiting):
        task.cancel()
    await asyncio.wait(waiting)
    pace.speed_up()
    assert await at_once(pace, 5) == 2


async def test_a_search_that_is_cancelled_before_its_turn_leaves_no_request(recwarn):
    """Python warned of a request that nobody awaited."""
    async with client_of(Service(Busy(answer_s=60)), max_connections=1) as client:
        asked = [asyncio.ensure_future(client.search(f"country {n}", n, QUESTION, 0)) for n in range(3)]
        await asyncio.wait(asked, timeout=0.3 * SLOW)
        for one in asked:
            one.cancel()
        await asyncio.wait(asked)
    gc.collect()
    assert [str(one.message) for one in recwarn if "never awaited" in str(one.message)] == []


async def test_a_search_that_is_cancelled_before_its_turn_is_never_sent():
    """The shared one continued, and those before whom it came waited longer."""
    may_answer = asyncio.Event()

    async def answer(service: Service, request: web.Request) -> web.StreamResponse:
        await may_answer.wait()
        return await finds("Lima")(service, request)

    service = Service(answer)
    async with client_of(service, max_connections=1, deterministic=True) as client:
        first, dead, living = (
            asyncio.ensure_future(client.search(name, 0, QUESTION, 0)) for name in ("first", "dead", "living")
        )
        while not service.requests:
            await asyncio.sleep(0.01)
        dead.cancel()
        await asyncio.wait([dead])
        may_answer.set()
        assert await asyncio.gather(first, living) == [["Lima"], ["Lima"]]
    assert "dead" not in {seen["queries"][0] for seen in service.bodies}


async def test_a_search_that_fails_after_a_long_wait_for_its_turn_is_repeated():
    """The wait counted as time in which it failed."""
    failed = []

    async def answer(service: Service, request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.1 * SLOW)
        if (await request.json())["queries"] == ["last"] and not failed:
            failed.append(True)
            return web.Response(status=500)
        return await finds("Lima")(service, request)

    async with client_of(Service(answer), max_connections=1, timeout_s=5 * SLOW, outage_s=0.5 * SLOW) as client:
        asked = [client.search(name, 0, QUESTION, 0) for name in [*map(str, range(9)), "last"]]
        assert await asyncio.gather(*asked) == [["Lima"]] * 10
    assert failed


async def test_a_gateway_that_limits_all_paths_is_not_asked_for_its_health_meanwhile():
    """It was asked again after each refusal, and the refusals had another server's name."""
    refuses = says("too many", 429, Retry_After="0.5")
    health = Service(says({"deterministic": True, "accepts_seed": False, "serves": "a corpus"}), refuses)
    service = Service(finds("Lima"), refuses, refuses, finds("Lima"))
    async with client_of(service, health, outage_s=20) as client:
        assert await client.search("one", 0, QUESTION, 0) == ["Lima"]
        assert await client.search("two", 0, QUESTION, 0) == ["Lima"]
        assert client.failures == {"status": 2}
    assert len(health.requests) == 1


async def test_a_health_that_is_refused_as_too_many_waits_as_long_as_it_says():
    health = Service(says("too many", 429, Retry_After="0.5"), says("", 404))
    async with client_of(Service(finds("Lima")), health, outage_s=20) as client:
        assert await client.search("one", 0, QUESTION, 0) == ["Lima"]
        assert client.failures == {"status": 1}
    first, second = health.requests
    assert second.at_s - first.at_s >= 0.5


async def test_a_search_that_is_always_refused_as_too_many_ends():
    """While others are answered, as those that a web search has kept are after its budget is spent."""

    async def answer(service: Service, request: web.Request) -> web.StreamResponse:
        if (await request.json())["queries"] == ["new"]:
            return web.Response(status=429, headers={"Retry-After": "0.01"}, text="spent")
        return await finds("Lima")(service, request)

    async with client_of(Service(answer), outage_s=0.4) as client:
        new = asyncio.ensure_future(client.search("new", 0, QUESTION, 0))
        number = 0
        while not new.done():
            number += 1
            assert await client.search(f"known {number}", number, QUESTION, 0) == ["Lima"]
            await asyncio.sleep(0.01)
        with pytest.raises(SearchRefused, match="429: spent"):
            await new
