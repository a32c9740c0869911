"""Planted bugs in the gateway for agents: `mutants.py` plants them too."""

from __future__ import annotations

TOKENS = ("agents/conversation.py", "agents")
EPISODES = ("agents/episode.py", "agents/test_episodes.py")
GATEWAY = ("agents/gateway.py", "agents/test_gateway.py")

AGENTS = {
    "a changed history goes unnoticed": (TOKENS, "if not known.says(given):", "if known.role != given.role:"),
    "white space around a turn changes history": (
        TOKENS,
        "self.content.strip() == other.content.strip()",
        "self.content == other.content",
    ),
    "the form of the JSON changes history": (TOKENS, "(call.name, call.parsed)", "(call.name, call.arguments)"),
    "an assistant's message of the program passes as the policy's": (
        TOKENS,
        'if any(message.role == "assistant" for message in new):',
        "if False:",
    ),
    "other tools pass": (TOKENS, "if list(tools) != list(self._tools):", "if False:"),
    "a cut turn is not ended": (TOKENS, "(len(self.end) if self._is_open else 0)", "0"),
    "the end of a turn is given twice": (TOKENS, "turn[: turn.rfind(self.end) + len(self.end)]", '""'),
    "a text becomes a special token": (
        TOKENS,
        "foreign = encode(self._tokenizer, message.content, is_foreign=True)",
        "foreign = encode(self._tokenizer, message.content)",
    ),
    "results of other tools count": (
        ("agents/chat.py", "agents/test_episodes.py"),
        "if not names or call.name in names",
        "if True",
    ),
    "every turn counts": (EPISODES, "if not request.tools or tool_results(new, names, self.calls):", "if True:"),
    "a failed search is forgiven": (EPISODES, "            self.outage = error\n", ""),
    "a dead engine is an agent's failure": (EPISODES, "turns.outage or session.outage()", "turns.outage"),
    "a limit fails the episode": (EPISODES, "if turns.reached_limit:", "if False:"),
    "there is no last turn": (EPISODES, "if number > settings.s_max:", "if False:"),
    "greedy episodes have a seed": (
        EPISODES,
        "self.episode.seed if self.temperature > 0 else None",
        "self.episode.seed",
    ),
    "a request that is sent again is sampled again": (
        ("agents/gateway.py", "agents"),
        "if self.last is None or not _same(self.last[0], request):",
        "if True:",
    ),
    "two requests at once are answered": (GATEWAY, "not self.last[1].done():", "False:"),
    "a client that goes ends its turn": (GATEWAY, "await asyncio.shield(self.last[1])", "await self.last[1]"),
    "any key opens any session": (GATEWAY, "if not has_token(request, key):", "if False:"),
    "another temperature is taken": (
        ("agents/chat.py", "agents/test_gateway.py"),
        "if temperature != settings.temperature:",
        "if False:",
    ),
    "fields that are not known are left out": (
        ("agents/chat.py", "agents/test_gateway.py"),
        "    if given:\n",
        "    if False:\n",
    ),
}
