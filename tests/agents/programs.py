"""Agents of users, as they are written for any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

import aiohttp
from openai import AsyncOpenAI, BadRequestError

from cusearch_async.environments.task import Task

SEARCH: Any = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the encyclopedia.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


def client_of(task: Task) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0)


async def with_tools(task: Task) -> str:
    """Asks for tools until the policy answers without one."""
    messages: list = [{"role": "user", "content": task.question}]
    async with client_of(task) as client:
        while True:
            reply = await client.chat.completions.create(model=task.model, messages=messages, tools=[SEARCH])
            message = reply.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            messages.append(message)
            for call in message.tool_calls:
                found = await task.search(json.loads(call.function.arguments)["query"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "\n".join(found)})


async def streaming(task: Task) -> str:
    async with client_of(task) as client:
        stream = await client.chat.completions.create(
            model=task.model, messages=[{"role": "user", "content": task.question}], stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


async def in_words(task: Task) -> str | None:
    """Without tools: a line `search: …` is searched for, anything else is the answer."""
    messages: list = [{"role": "user", "content": task.question}]
    async with client_of(task) as client:
        while True:
            reply = await client.chat.completions.create(model=task.model, messages=messages)
            text = (reply.choices[0].message.content or "").strip()
            if not text.startswith("search: "):
                return text or None
            found = await task.search(text.removeprefix("search: "))
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "\n".join(found)}]


async def asks_nothing(task: Task) -> str:
    return "5"


async def fails(task: Task) -> str:
    raise KeyError("no such thing")


async def times_out(task: Task) -> str:
    raise TimeoutError("its browser")


async def hangs(task: Task) -> str:
    await asyncio.Event().wait()
    return ""


async def forgives(task: Task) -> str:
    """Answers whatever happens to its searches."""
    try:
        return await with_tools(task)
    except Exception:
        return "5"


async def rewards_itself(task: Task) -> float:
    await with_tools(task)
    return 0.25


async def rewards_nothing_finite(task: Task) -> float:
    await with_tools(task)
    return float("nan")


async def rewrites_history(task: Task) -> str:
    messages: list = [{"role": "user", "content": task.question}]
    async with client_of(task) as client:
        reply = await client.chat.completions.create(model=task.model, messages=messages)
        said = "(a summary) " + (reply.choices[0].message.content or "")
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
        reply = await client.chat.completions.create(model=task.model, messages=messages)
    return reply.choices[0].message.content or ""


async def forgets_old_results(task: Task) -> str:
    """Shortens the results before the last one, as agents do whose history becomes long."""
    messages: list = [{"role": "user", "content": task.question}]
    async with client_of(task) as client:
        while True:
            reply = await client.chat.completions.create(model=task.model, messages=messages, tools=[SEARCH])
            message = reply.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            for old in messages:
                if isinstance(old, dict) and old["role"] == "tool":
                    old["content"] = "…"
            messages.append(message)
            for call in message.tool_calls:
                found = await task.search(json.loads(call.function.arguments)["query"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "\n".join(found)})


async def with_responses(task: Task) -> str:
    """The same as `with_tools` over the Responses API."""
    items: list = [{"role": "user", "content": task.question}]
    tool: Any = {"type": "function", **SEARCH["function"]}
    async with client_of(task) as client:
        while True:
            reply = await client.responses.create(model=task.model, input=items, tools=[tool], store=False)
            calls = [item for item in reply.output if item.type == "function_call"]
            if not calls:
                return reply.output_text
            items += [item.model_dump() for item in reply.output]
            for call in calls:
                found = await task.search(json.loads(call.arguments)["query"])
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": "\n".join(found)})


async def streaming_responses(task: Task) -> str:
    async with client_of(task) as client, client.responses.stream(model=task.model, input=task.question) as stream:
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        assert text == (await stream.get_final_response()).output_text
        return text


async def with_messages(task: Task) -> str:
    """The same over Anthropic's Messages API."""
    messages: list = [{"role": "user", "content": task.question}]
    function = SEARCH["function"]
    tool = {"name": "search", "description": function["description"], "input_schema": function["parameters"]}
    body = {"model": task.model, "max_tokens": 200, "tools": [tool], "messages": messages}
    async with aiohttp.ClientSession(headers={"x-api-key": task.api_key}) as session:
        while True:
            async with session.post(f"{task.base_url}/messages", json=body) as response:
                reply = await response.json()
            blocks = reply["content"]
            if reply["stop_reason"] != "tool_use":
                return "".join(block["text"] for block in blocks)
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": "\n".join(found)}
                for block in blocks
                if block["type"] == "tool_use"
                for found in [await task.search(block["input"]["query"])]
            ]
            messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]


async def tells_its_calls_as_text(task: Task) -> str:
    """Each request is a new conversation, with what it knows in one message."""
    known = ""
    async with client_of(task) as client:
        while True:
            messages: Any = [{"role": "user", "content": task.question + known}]
            reply = await client.chat.completions.create(model=task.model, messages=messages, tools=[SEARCH])
            message = reply.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                found = await task.search(json.loads(call.function.arguments)["query"])
                known += f" I found: {found}"


async def writes_its_tags_back(task: Task) -> str:
    """The stop is no part of a reply, and the policy shall see it."""
    messages: list = [{"role": "user", "content": task.question}]
    async with client_of(task) as client:
        while True:
            reply = await client.chat.completions.create(model=task.model, messages=messages, stop=["</search>"])
            said = reply.choices[0].message.content or ""
            if "<search>" not in said:
                return said
            messages += [{"role": "assistant", "content": f"{said}</search>"}, {"role": "user", "content": "Found."}]


async def grows_one_message(task: Task) -> str:
    """As `tells_its_calls_as_text`, without tools."""
    known = task.question
    async with client_of(task) as client:
        while True:
            messages: Any = [{"role": "user", "content": known}]
            reply = await client.chat.completions.create(model=task.model, messages=messages)
            said = reply.choices[0].message.content or ""
            if "<search>" not in said:
                return said
            known += f"\n{said}\nFound."


async def asks_until_it_is_answered(task: Task) -> str:
    messages: Any = [{"role": "user", "content": task.question}]
    async with client_of(task) as client:
        for number in range(3):
            with contextlib.suppress(BadRequestError):
                reply = await client.chat.completions.create(
                    model=task.model, messages=messages, extra_headers={"x-stainless-retry-count": "0"}
                )
                return reply.choices[0].message.content or ""
            messages = [{"role": "user", "content": f"{task.question} ({number})"}]
    return ""


async def asks_two_at_once(task: Task) -> str:
    async with client_of(task) as client:
        asking = (
            client.chat.completions.create(model=task.model, messages=[{"role": "user", "content": text}])
            for text in (task.question, "Or where?")
        )
        replies = await asyncio.gather(*asking)
    return " ".join(reply.choices[0].message.content or "" for reply in replies)


async def asks_twice(task: Task) -> str:
    """Sends its request again, as clients do when a connection was lost."""
    messages: list = [{"role": "user", "content": task.question}]
    async with client_of(task) as client:
        ask = client.chat.completions.create
        replies = [
            await ask(model=task.model, messages=messages, extra_headers={"x-stainless-retry-count": str(attempt)})
            for attempt in range(3)
        ]
    assert len({reply.model_dump_json() for reply in replies}) == 1
    return replies[0].choices[0].message.content or ""


async def samples_three(task: Task) -> str:
    """Asks the same thing anew, for another sample, and takes the last."""
    messages: list = [{"role": "user", "content": task.question}]
    async with client_of(task) as client:
        asking = (client.chat.completions.create(model=task.model, messages=messages) for _ in range(3))
        replies = [await one for one in asking]
    return replies[-1].choices[0].message.content or ""


async def searches_first(task: Task) -> str:
    """Twice, and asks then."""
    found = [*await task.search(task.question), *await task.search(task.question)]
    async with client_of(task) as client:
        content = f"{found} {task.question}"
        messages: list = [{"role": "user", "content": content}]
        reply = await client.chat.completions.create(model=task.model, messages=messages)
    return reply.choices[0].message.content or ""


async def gives_other_ids(task: Task) -> str:
    """To its calls and their results."""
    return await _searches(task, lambda call: {"tool_call_id": call["id"]})


async def gives_no_ids(task: Task) -> str:
    return await _searches(task, lambda call: {"name": call["function"]["name"]})


async def gives_other_ids_and_forgets(task: Task) -> str:
    return await _searches(task, lambda call: {"tool_call_id": call["id"]}, forgets=True)


async def gives_no_ids_and_forgets(task: Task) -> str:
    return await _searches(task, lambda call: {"name": call["function"]["name"]}, forgets=True)


async def _searches(task: Task, named: Callable[[dict], dict], forgets: bool = False) -> str:
    """Searches as long as the policy wants to; the calls have ids of this program. Old results may be shortened."""
    messages: list = [{"role": "user", "content": task.question}]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {task.api_key}"}) as session:
        while True:
            body = {"messages": messages, "tools": [SEARCH]}
            async with session.post(f"{task.base_url}/chat/completions", json=body) as response:
                (choice,) = (await response.json())["choices"]
            message = choice["message"]
            if not message.get("tool_calls"):
                return str(message["content"])
            for number, call in enumerate(message["tool_calls"]):
                call["id"] = f"mine-{len(messages)}-{number}"
            for old in messages if forgets else ():
                if old["role"] == "tool":
                    old["content"] = "…"
            messages.append(message)
            for call in message["tool_calls"]:
                found = await task.search(json.loads(call["function"]["arguments"])["query"])
                messages.append({"role": "tool", "content": "\n".join(found)} | named(call))


async def asks_for_more(task: Task) -> str:
    """Asks again for a turn that was cut, with more tokens, as a client that numbers no attempts."""
    body: dict = {"messages": [{"role": "user", "content": task.question}]}
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {task.api_key}"}) as session:
        for most in (1, 100):
            async with session.post(f"{task.base_url}/chat/completions", json=body | {"max_tokens": most}) as response:
                (choice,) = (await response.json())["choices"]
    return str(choice["message"]["content"])


async def asks_for_ever(task: Task) -> str:
    """The same, without a client that says how often."""
    body = {"messages": [{"role": "user", "content": task.question}]}
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {task.api_key}"}) as session:
        while True:
            async with session.post(f"{task.base_url}/chat/completions", json=body) as response:
                if response.status != 200:
                    raise RuntimeError((await response.json())["error"]["message"])


async def asks_for_little(task: Task) -> str:
    messages: list = [{"role": "user", "content": task.question}]
    async with client_of(task) as client:
        reply = await client.chat.completions.create(model=task.model, messages=messages, max_tokens=6)
        return f"{reply.choices[0].finish_reason}"


async def trusts_the_policy(task: Task) -> str:
    """Fails where the policy calls what is no tool, or with other arguments, and where its turn is cut."""
    messages: list = [{"role": "user", "content": task.question}]
    async with client_of(task) as client:
        reply = await client.chat.completions.create(model=task.model, messages=messages, tools=[SEARCH])
        assert reply.choices[0].finish_reason != "length"
        (call,) = reply.choices[0].message.tool_calls
        return {"search": json.loads}[call.function.name](call.function.arguments)["query"].strip()


async def changes_temperature(task: Task) -> str:
    async with client_of(task) as client:
        messages: list = [{"role": "user", "content": task.question}]
        await client.chat.completions.create(model=task.model, messages=messages, temperature=0.123)
    return ""


def not_async(task: Task) -> str:
    return ""
