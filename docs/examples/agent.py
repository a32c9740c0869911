"""An agent that is written for any OpenAI-compatible server, and trained as it is (docs/agents.md): the policy searches
with <search>…</search>, and answers with <answer>…</answer>."""

from __future__ import annotations

import re
from typing import Any

from openai import AsyncOpenAI

from cusearch_async.environments.task import Task

ANYWHERE = AsyncOpenAI(base_url="http://localhost", api_key="of the episode")
"""One for all episodes, so that they share its connections."""
AGAIN = "\nMy previous action is invalid. Let me try again.\n"


async def answer(task: Task) -> str | None:
    client = ANYWHERE.with_options(base_url=task.base_url, api_key=task.api_key)
    messages: list[Any] = [{"role": "user", "content": f"Question: {task.question}\n"}]
    while True:
        reply = await client.chat.completions.create(
            model=task.model, messages=messages, stop=["</search>", "</answer>"]
        )
        said = reply.choices[0].message.content or ""
        action = re.search(r".*<(search|answer)>(.*)", said, re.DOTALL)
        if action and action[1] == "answer":
            return action[2].strip()
        shown = documents(await task.search(action[2].strip())) if action else AGAIN
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": shown}]


def documents(found: list[str]) -> str:
    """Without their titles, as the policy of the demo knows them."""
    return "".join(contents.partition("\n")[2] + "\n" for contents in found)
