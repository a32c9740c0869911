"""An environment without a search."""

from __future__ import annotations

from cusearch_async.environments import DONE, Environment, Observation, Quoted, Score


class Echo(Environment):
    """Says what it was told, for two turns."""

    async def step(self, episode, turn):
        episode.memory = (episode.memory or 0) + 1
        if turn == "end":
            return DONE
        return Observation(text=Quoted("<", turn, ">"), author="echo", counts=turn == "tool", done=turn == "last tool")

    async def score(self, episode):
        return Score(reward=-float(episode.memory), prediction="x")
