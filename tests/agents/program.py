"""A program of its own, with nothing but the standard library: asks once for a search, then for the answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import Request, urlopen


def post(url: str, body: dict) -> dict:
    key = os.environ["OPENAI_API_KEY"]
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=60) as response:
        return json.load(response)


def main() -> None:
    how = sys.argv[1]
    assert not [name for name in os.environ if "PASSWORD" in name], "no secrets of the run"
    if how == "hangs":
        Path(sys.argv[2]).write_text(str(os.getpid()))
        time.sleep(600)
    if how.startswith("leaves"):
        subprocess.Popen(["sleep", "30"], start_new_session=how == "leaves alone")
    if how == "fails":
        print("a traceback", file=sys.stderr)
        sys.exit("there is no key for that")
    print(f"{os.environ['CUSEARCH_QUESTION']} is looked up " * (50_000 if how == "chatty" else 1), file=sys.stderr)
    messages = [{"role": "user", "content": os.environ["CUSEARCH_QUESTION"]}]
    for _ in range(3 if how == "insists" else 2):
        answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": messages})
        said = answer["choices"][0]["message"]["content"]
        if not said.startswith("search: "):
            break
        found = post(os.environ["CUSEARCH_SEARCH_URL"], {"query": said.removeprefix("search: ")})["documents"]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "\n".join(found)}]
    print("thinking …" * (50_000 if how == "chatty" else 1))
    print(said if how != "silent" else "")


if __name__ == "__main__":
    main()
