"""An agent that is written for any OpenAI-compatible server, and trained as it is (docs/agents.md): until the policy
answers, its tool is called."""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI

from cusearch_async.environments.task import Task

ANYWHERE = AsyncOpenAI(base_url="http://localhost", api_key="of the episode")
"""One for all episodes, so that they share its connections."""
QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
TOOLS: Any = [{"type": "function", "function": {"name": "search", "description": "Search.", "parameters": QUERY}}]


async def answer(task: Task) -> str | None:
    client = ANYWHERE.with_options(base_url=task.base_url, api_key=task.api_key)
    messages: list[Any] = [{"role": "user", "content": task.question}]
    while True:
        reply = await client.chat.completions.create(model=task.model, messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        messages.append(message)
        calls = [call for call in message.tool_calls or () if call.type == "function"]
        for call in calls:
            found = await task.search(json.loads(call.function.arguments)["query"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": documents(found)})
        if not calls:
            return message.content


def documents(found: list[str]) -> str:
    """Without their titles, as the policy of the demo knows them."""
    return "".join(contents.partition("\n")[2] + "\n" for contents in found)
