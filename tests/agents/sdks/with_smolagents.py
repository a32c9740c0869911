"""An agent of smolagents that calls tools, over Chat Completions. It forces a tool at every turn (tool_choice)."""

import json
import os
import urllib.request

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool


@tool
def search(query: str) -> str:
    """Search the encyclopedia.

    Args:
        query: What to search for.
    """
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    asked = urllib.request.Request(
        os.environ["CUSEARCH_SEARCH_URL"], json.dumps({"query": query}).encode(), headers=headers
    )
    with urllib.request.urlopen(asked) as response:
        return "\n".join(json.load(response)["documents"])


model = OpenAIModel(
    model_id=os.environ["OPENAI_MODEL"], api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
agent = ToolCallingAgent(tools=[search], model=model, verbosity_level=LogLevel.OFF, max_steps=5)
print(agent.run(os.environ["CUSEARCH_QUESTION"]))
