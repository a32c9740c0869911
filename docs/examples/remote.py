"""The same agent on another machine (docs/agents.md): python -m docs.examples.remote http://10.0.0.5:9000 8

It asks a rollout worker for episodes, here eight at a time, until the worker has not answered for ten minutes."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError

from docs.examples.program import post, solve

GIVE_UP_S = 600


def work(address: str) -> None:
    heard = time.monotonic()
    while time.monotonic() - heard < GIVE_UP_S:
        try:
            task = post(f"{address}/tasks", os.environ["CUSEARCH_AGENTS_TOKEN"], {})
            heard = time.monotonic()
            if task is not None:
                run(task)
                heard = time.monotonic()
        except OSError as error:  # the worker is not there
            print(f"{address}: {error}", flush=True)
            time.sleep(1)


def run(task: dict[str, str]) -> None:
    try:
        end = {"answer": solve(task["question"], task["base_url"], task["api_key"], task["search_url"])}
    except Exception as error:
        end = {"error": f"{type(error).__name__}: {error}"}
    try:
        post(task["end_url"], task["api_key"], end)
    except HTTPError as error:  # the worker is there, and the episode has ended without us
        print(f"{task['end_url']}: {error}", flush=True)


if __name__ == "__main__":
    address, count = sys.argv[1], int(sys.argv[2])
    with ThreadPoolExecutor(count) as workers:
        list(workers.map(work, [address] * count))
