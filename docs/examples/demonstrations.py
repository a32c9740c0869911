"""Demonstrations for `cusearch warmstart`, from questions with a decomposition, by asking the run's retriever.

    python -m docs.examples.demonstrations QUESTIONS.jsonl DEMONSTRATIONS.jsonl laptop mine.toml

A question's row has `metadata.decomposition`, a list of {"question", "answer"} as MuSiQue has it ("#1 >> spouse": of
the first answer); without one, the question itself is the only search. A row is written where every search finds its
answer.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cusearch_async.algorithm.answers import normalize_answer
from cusearch_async.config import Config, load_config
from cusearch_async.environments import Search
from cusearch_async.retrieval.client import SearchClient
from cusearch_async.types import Question


def searches(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(query, answer) of each link."""
    known: list[str] = []
    whole = {"question": row["question"], "answer": row["golden_answers"][0]}
    for link in row.get("metadata", {}).get("decomposition") or [whole]:
        asked = re.sub(r"#(\d+)", lambda place: known[int(place[1]) - 1], link["question"])
        known.append(link["answer"])
        yield asked.replace(" >> ", " "), link["answer"]


async def demonstration(row: dict[str, Any], number: int, client: Search) -> dict[str, Any] | None:
    """None where a search does not find its answer."""
    question = Question(id=str(number), text=row["question"], answers=tuple(row["golden_answers"]), category="")
    thought, turns, documents = "I have to search.", [], []
    for query, answer in searches(row):
        turns.append(f"<think>{thought}</think><search>{query}</search>")
        documents.append(await client.search(query, 0, question, number))
        if normalize_answer(answer) not in normalize_answer(" ".join(documents[-1])):
            return None
        thought = f"{query}: {answer}."
    turns.append(f"<think>{thought}</think><answer>{row['golden_answers'][0]}</answer>")
    return {key: row[key] for key in ("question", "golden_answers")} | {"turns": turns, "documents": documents}


async def ask(rows: list[dict[str, Any]], config: Config) -> list[dict[str, Any]]:
    async with SearchClient.open(config.retriever, config.episode, config.questions_per_step) as client:
        await client.wait_until_answering(config.run.wait_s)
        found = [await demonstration(row, number, client) for number, row in enumerate(rows)]
    return [one for one in found if one]


def main(source: Path, target: Path, configs: list[Path]) -> None:
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").split("\n") if line.strip()]
    found = asyncio.run(ask(rows, load_config(configs)))
    target.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in found), encoding="utf-8")
    print(f"{len(found)} demonstrations of {len(rows)} questions in {target}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [Path(name) for name in sys.argv[3:]])
