"""An agent of the OpenAI Agents SDK, over the Responses API; with `stream` as its argument over its events."""

import asyncio
import os
import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled
from retriever import find


@function_tool
def search(query: str) -> str:
    """Search the encyclopedia.

    Args:
        query: What to search for.
    """
    return find(query)


async def main() -> None:
    set_tracing_disabled(True)
    agent = Agent(
        name="searcher", instructions="Search, then answer.", model=os.environ["OPENAI_MODEL"], tools=[search]
    )
    question = os.environ["CUSEARCH_QUESTION"]
    if sys.argv[1:] == ["stream"]:
        running = Runner.run_streamed(agent, question)
        async for _ in running.stream_events():
            pass
        print(running.final_output)
    else:
        print((await Runner.run(agent, question)).final_output)


asyncio.run(main())
