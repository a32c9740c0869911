"""A loop over Anthropic's client, over the Messages API; with `stream` as its argument over its events."""

import json
import os
import sys
import urllib.request

from anthropic import Anthropic

client, model = Anthropic(), os.environ["OPENAI_MODEL"]
TOOL = {
    "name": "search",
    "description": "Search the encyclopedia.",
    "input_schema": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
}


def search(query):
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    asked = urllib.request.Request(
        os.environ["CUSEARCH_SEARCH_URL"], json.dumps({"query": query}).encode(), headers=headers
    )
    with urllib.request.urlopen(asked) as response:
        return "\n".join(json.load(response)["documents"])


def ask(messages):
    asked = {"model": model, "max_tokens": 200, "tools": [TOOL], "messages": messages}
    if sys.argv[1:] == ["stream"]:
        with client.messages.stream(**asked) as stream:
            return stream.get_final_message()
    return client.messages.create(**asked)


messages = [{"role": "user", "content": os.environ["CUSEARCH_QUESTION"]}]
while (reply := ask(messages)).stop_reason == "tool_use":
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": search(block.input["query"])}
        for block in reply.content
        if block.type == "tool_use"
    ]
    messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
print(reply.content[0].text)
