"""An agent of smolagents that calls tools, over Chat Completions. It forces a tool at every turn (tool_choice)."""

import os

from retriever import find
from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool


@tool
def search(query: str) -> str:
    """Search the encyclopedia.

    Args:
        query: What to search for.
    """
    return find(query)


model = OpenAIModel(
    model_id=os.environ["OPENAI_MODEL"], api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
agent = ToolCallingAgent(tools=[search], model=model, verbosity_level=LogLevel.OFF, max_steps=5)
print(agent.run(os.environ["CUSEARCH_QUESTION"]))
