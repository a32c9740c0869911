"""A loop over Anthropic's client, over the Messages API; with `stream` as its argument over its events."""

import os
import sys

from anthropic import Anthropic
from retriever import find

client, model = Anthropic(), os.environ["OPENAI_MODEL"]
TOOL = {
    "name": "search",
    "description": "Search the encyclopedia.",
    "input_schema": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
}


def ask(messages):
    asked = {"model": model, "max_tokens": 200, "tools": [TOOL], "messages": messages}
    if sys.argv[1:] == ["stream"]:
        with client.messages.stream(**asked) as stream:
            return stream.get_final_message()
    return client.messages.create(**asked)


messages = [{"role": "user", "content": os.environ["CUSEARCH_QUESTION"]}]
while (reply := ask(messages)).stop_reason == "tool_use":
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": find(block.input["query"])}
        for block in reply.content
        if block.type == "tool_use"
    ]
    messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
print(reply.content[0].text)
