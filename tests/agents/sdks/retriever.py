"""The retriever of the run, for the programs beside this file."""

import json
import os
import urllib.request


def find(query):
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    asked = urllib.request.Request(
        os.environ["CUSEARCH_SEARCH_URL"], json.dumps({"query": query}).encode(), headers=headers
    )
    with urllib.request.urlopen(asked) as response:
        return "\n".join(json.load(response)["documents"])
