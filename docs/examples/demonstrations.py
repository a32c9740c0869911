"""Demonstrations for `cusearch warmstart`, from questions with a decomposition, by asking the run's retriever.

    python -m docs.examples.demonstrations QUESTIONS.jsonl DEMONSTRATIONS.jsonl laptop mine.toml

A question's row has `metadata.question_decomposition` (or `decomposition`), a list of {"question", "answer"} as MuSiQue
has it ("#1 >> spouse": of the first answer), whose own file `cusearch data convert` brings into this form. Without one,
the question itself is the only search. A row is written as soon as every search has found its answer.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cusearch_async.algorithm.answers import sub_exact_match
from cusearch_async.config import Config, load_config
from cusearch_async.environments import Search
from cusearch_async.retrieval.client import SearchClient
from cusearch_async.types import Question


def searches(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(query, answer) of each link."""
    metadata, known = row.get("metadata") or {}, list[str]()

    def named(place: re.Match[str]) -> str:
        """The answer that is meant; "#1" may also be a place in a list."""
        number = int(place[1])
        return known[number - 1] if 0 < number <= len(known) else place[0]

    links = metadata.get("question_decomposition") or metadata.get("decomposition")
    if not links:
        yield row["question"], row["golden_answers"][0]
    for link in links or ():
        asked = re.sub(r"#(\d+)", named, link["question"])
        known.append(link["answer"])
        yield asked.replace(" >> ", " "), link["answer"]


async def demonstration(row: dict[str, Any], number: int, client: Search) -> dict[str, Any] | None:
    """None where a search does not find its answer."""
    question = Question(id=str(number), text=row["question"], answers=tuple(row["golden_answers"]), category="")
    thought, turns, documents = "I have to search.", [], []
    for query, answer in searches(row):
        turns.append(f"<think>{thought}</think><search>{query}</search>")
        documents.append(await client.search(query, 0, question, number))
        if not sub_exact_match(" ".join(documents[-1]), [answer]):
            return None
        thought = f"{query}: {answer}."
    turns.append(f"<think>{thought}</think><answer>{row['golden_answers'][0]}</answer>")
    return {key: row[key] for key in ("question", "golden_answers")} | {"turns": turns, "documents": documents}


async def write(rows: list[dict[str, Any]], config: Config, target: Path) -> int:
    """How many were written."""
    count = 0
    async with SearchClient.open(config.retriever, config.episode, config.questions_per_step) as client:
        await client.wait_until_answering(config.run.wait_s)
        with target.open("w", encoding="utf-8") as file:
            for number, row in enumerate(rows):
                if found := await demonstration(row, number, client):
                    file.write(json.dumps(found, ensure_ascii=False) + "\n")
                    file.flush()
                    count += 1
    return count


def main(source: Path, target: Path, configs: list[Path]) -> None:
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").split("\n") if line.strip()]
    count = asyncio.run(write(rows, load_config(configs), target))
    print(f"{count} demonstrations of {len(rows)} questions in {target}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [Path(name) for name in sys.argv[3:]])
