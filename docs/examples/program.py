"""An agent as a program, with nothing but the standard library (docs/agents.md): it searches with <search>…</search>,
and prints what is in <answer>…</answer>."""

from __future__ import annotations

import json
import os
import re
from typing import Any
from urllib.request import Request, urlopen


def post(url: str, key: str, body: dict[str, Any]) -> Any:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    asked = Request(url, json.dumps(body).encode(), headers)  # noqa: S310  (http, as the worker said)
    with urlopen(asked, timeout=600) as response:  # noqa: S310
        return json.loads(response.read() or b"null")


def solve(question: str, base_url: str, key: str, search_url: str) -> str:
    messages = [{"role": "user", "content": question}]
    while True:
        asked = {"messages": messages, "stop": ["</search>", "</answer>"]}
        said = post(f"{base_url}/chat/completions", key, asked)["choices"][0]["message"]["content"]
        action = re.search(r".*<(search|answer)>(.*)", said, re.DOTALL)
        if action and action[1] == "answer":
            return action[2].strip()
        shown = "\nMy previous action is invalid. Let me try again.\n"
        if action:
            found = post(search_url, key, {"query": action[2].strip()})["documents"]
            # without titles, as the policy of the demo knows them
            shown = "".join(contents.partition("\n")[2] + "\n" for contents in found)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": shown}]


if __name__ == "__main__":
    names = ("CUSEARCH_QUESTION", "OPENAI_BASE_URL", "OPENAI_API_KEY", "CUSEARCH_SEARCH_URL")
    print(solve(*(os.environ[name] for name in names)))
