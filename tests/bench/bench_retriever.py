"""How fast the BM25 retriever is, against calling bm25s in the same run without any server.

    python -m tests.bench.bench_retriever [--passages 1000000] [--seconds 15]

Two corpora: the atlas, and synthetic passages of 60 words drawn by Zipf's law from 200,000. For each: seconds to
index (`cusearch index` for the large one), memory of the retriever process, searches per second of 1 and of 64
clients over HTTP, and of a plain loop over the same index in this process. Figures also go to
runs/bench/retriever.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from cusearch_async.atlas.questions import WORLDS, train_questions
from cusearch_async.config import load_config
from cusearch_async.data.questions import load_corpus
from cusearch_async.lifecycle.children import start_child
from cusearch_async.retrieval import indexing
from cusearch_async.retrieval.indexing import Index
from cusearch_async.transport.server import is_listening
from tests.conftest import free_port, wait_until

OUTPUT = Path("runs/bench/retriever.json")
WORDS, LENGTH, QUERY = 200_000, 60, 5
TOPK = 3
CHUNK = 50_000


def write_corpus(path: Path, passages: int) -> None:
    rng = np.random.default_rng(0)
    words = np.array([f"w{number:06d}" for number in range(WORDS)])
    with path.open("w", encoding="utf-8") as file:
        for first in range(0, passages, CHUNK):
            drawn = words[zipf(rng, (min(CHUNK, passages - first), LENGTH))]
            for number, row in enumerate(drawn.tolist(), first):
                file.write(f'{{"id": "{number}", "contents": "\\"P{number}\\"\\n{" ".join(row)}"}}\n')


def zipf(rng: Any, shape: tuple[int, ...]) -> Any:
    """Word numbers, number k with a probability of about 1 / (k + 1)."""
    return np.minimum(np.exp(rng.random(shape) * np.log(WORDS)).astype(np.int64), WORDS - 1)


def queries_of(kind: str) -> list[str]:
    if kind == "atlas":
        return [question.text for question in train_questions(WORLDS["atlas"])[:5000]]
    rows = zipf(np.random.default_rng(1), (5000, QUERY)).tolist()
    return [" ".join(f"w{number:06d}" for number in row) for row in rows]


async def clients(url: str, queries: Sequence[str], at_once: int, seconds: float) -> tuple[float, float]:
    """Searches per second, and the 99th percentile of their milliseconds."""
    latencies: list[float] = []
    end = time.perf_counter() + seconds
    waiting = iter(range(10**9))

    async def one(session: aiohttp.ClientSession) -> None:
        while time.perf_counter() < end:
            body = {"queries": [queries[next(waiting) % len(queries)]], "topk": TOPK, "return_scores": True}
            began = time.perf_counter()
            async with session.post(f"{url}/retrieve", json=body) as response:
                assert response.status == 200
                await response.read()
            latencies.append(time.perf_counter() - began)

    began = time.perf_counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=at_once)) as session:
        await asyncio.gather(*(one(session) for _ in range(at_once)))
    return len(latencies) / (time.perf_counter() - began), 1000 * float(np.quantile(latencies, 0.99))


def in_process(index: Index, queries: Sequence[str], seconds: float) -> float:
    """Searches per second of a loop over single queries."""
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        index.search([queries[count % len(queries)]], TOPK)
        count += 1
    return count / (time.perf_counter() - began)


def measure(kind: str, overrides: list[str], index: Index, seconds: float) -> dict[str, float]:
    url = f"http://127.0.0.1:{free_port()}"
    queries = queries_of(kind)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "workers.retriever", "configs/atlas.toml", "--retriever.url", url, *overrides]
        server = start_child(command, log_file=Path(folder) / "log")
        try:
            began = time.perf_counter()
            wait_until(lambda: is_listening(url), 600)
            start_s = time.perf_counter() - began
            asyncio.run(clients(url, queries, 4, 2))
            alone, alone_p99 = asyncio.run(clients(url, queries, 1, seconds))
            loop = in_process(index, queries, seconds)
            together, together_p99 = asyncio.run(clients(url, queries, 64, seconds))
            memory = psutil.Process(server.pid).memory_full_info()
        finally:
            server.terminate()
            server.wait()
    return {
        "passages": len(index.passages),
        "start_s": start_s,
        "own_memory_mib": memory.uss / 2**20,
        "resident_memory_mib": memory.rss / 2**20,
        "in_process_per_s": loop,
        "clients_1_per_s": alone,
        "clients_1_p99_ms": alone_p99,
        "clients_64_per_s": together,
        "clients_64_p99_ms": together_p99,
        "clients_64_over_in_process": together / loop,
    }


def large(passages: int, seconds: float, folder: Path) -> dict[str, float]:
    corpus, index = folder / "corpus.jsonl", folder / "index"
    write_corpus(corpus, passages)
    overrides = ["--retriever.corpus", str(corpus), "--retriever.index", str(index)]
    command = [sys.executable, "-m", "cusearch_async.cli.main", "index", "configs/atlas.toml", *overrides]
    began, most = time.perf_counter(), 0
    process = start_child(command)
    while process.poll() is None:
        most = max(most, psutil.Process(process.pid).memory_info().rss)
        time.sleep(0.2)
    assert process.returncode == 0
    took = time.perf_counter() - began
    settings = load_config(Path("configs/atlas.toml"), overrides).retriever
    figures = measure("synthetic", overrides, indexing.load(corpus, index, settings), seconds)
    size = sum(file.stat().st_size for file in index.rglob("*") if file.is_file())
    return {
        "index_s": took,
        "index_memory_mib": most / 2**20,
        "index_mib": size / 2**20,
        "corpus_mib": corpus.stat().st_size / 2**20,
        **figures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=15)
    arguments = parser.parse_args()
    settings = load_config(Path("configs/atlas.toml")).retriever
    began = time.perf_counter()
    atlas = indexing.in_memory(load_corpus("atlas"), settings)
    figures = {"atlas": {"index_s": time.perf_counter() - began, **measure("atlas", [], atlas, arguments.seconds)}}
    folder = Path(tempfile.mkdtemp())
    try:
        figures["synthetic"] = large(arguments.passages, arguments.seconds, folder)
    finally:
        shutil.rmtree(folder)
    table = Table(title=f"BM25 retriever, topk {TOPK}")
    table.add_column("figure")
    for name in figures:
        table.add_column(name, justify="right")
    for row in figures["synthetic"]:
        cells = (figures[name].get(row) for name in figures)
        table.add_row(row, *("" if v is None else f"{v:,.2f}" if v < 100 else f"{v:,.0f}" for v in cells))
    Console().print(table)
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
