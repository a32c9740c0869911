"""Planted bugs in the gateway for agents: `mutants.py` plants them too."""

from __future__ import annotations

TOKENS = ("agents/conversation.py", "agents")
EPISODES = ("agents/episode.py", "agents")
TURNS = ("agents/turns.py", "agents")
REMOTE = ("agents/remote.py", "agents/test_remote.py")
GATEWAY_REMOTE = ("agents/gateway.py", "agents/test_remote.py")
PROGRAMS = ("environments/program.py", "agents/test_programs.py")
API = ("agents/api.py", "agents/test_gateway.py")
GATEWAY = ("agents/gateway.py", "agents/test_gateway.py")

AGENTS = {
    "an agent's exit is the worker's": (EPISODES, "except BaseException as error:", "except Exception as error:"),
    "an agent is cancelled once": (EPISODES, "ATTEMPTS, END_S = 5, 3.0", "ATTEMPTS, END_S = 1, 3.0"),
    "another corpus is the program's affair": (
        TURNS,
        "        except CusearchError as error:\n            self.outage",
        "        except EpisodeFailed as error:\n            self.outage",
    ),
    "an answer has half characters": (EPISODES, "return without_surrogates(result)", "return result"),
    "a changed history goes unnoticed": (TOKENS, "if not known.says(given):", "if known.role != given.role:"),
    "white space around a turn changes history": (
        TOKENS,
        "other.content.strip() in [text.strip() for text in texts]",
        "other.content in texts",
    ),
    "the form of the JSON changes history": (TOKENS, "(call.name, call.as_object)", "(call.name, call.arguments)"),
    "an assistant's message of the program passes as the policy's": (
        TOKENS,
        'if any(message.role == "assistant" for message in messages[count:]):',
        "if False:",
    ),
    "other tools pass": (TOKENS, "if list(tools) == list(self._tools)", "if True"),
    "a cut turn is not ended": (TOKENS, "later[len(own) - len(self.end) :]", "later[len(own) :]"),
    "the end of a turn is given twice": (TOKENS, "turn[: turn.rfind(self.end) + len(self.end)]", '""'),
    "a text becomes a special token": (
        TOKENS,
        "foreign = encode(self._tokenizer, text, is_foreign=True)",
        "foreign = encode(self._tokenizer, text)",
    ),
    "thoughts that a program drops change history": (
        TOKENS,
        "for text in (one, one.rpartition(_END_OF_THOUGHTS)[2])",
        "for text in (one,)",
    ),
    "what a program says is lost after a limit": (EPISODES, "ending.stderr if failed is None else str(failed)", '""'),
    "a program's stderr is lost": (PROGRAMS, "Ending(written.last_line, errors.text)", "Ending(written.last_line)"),
    "ignored fields are not counted": (TURNS, "self.ignored_fields += len(request.ignored)", "pass"),
    "other ends of turns are not known": (TURNS, "*(token for token in ends if token != tokenizer.eos_token)", ""),
    "thoughts are shown as text, too": (TURNS, "parsed.text, calls, thoughts", "said, calls, thoughts"),
    "results of other tools count": (TURNS, "return not names or call.name in names", "return True"),
    "every turn counts": (TURNS, "(number == row.number and not request.tools):", "True:"),
    "a result counts in its own row alone": (TURNS, "if calls & answered or (is_told", "if (is_told"),
    "a result that is told as text does not count": (TURNS, "(is_told and is_told_anew) or ", ""),
    "a stop that is put back changes history": (TOKENS, "self.content + self.stopped", "self.content"),
    "a turn that is not told counts in a new row": (TURNS, "said and said in shown and", ""),
    "a result counts again in a new row": (TURNS, "                del self._uncounted[number]\n", ""),
    "a failed search is forgiven": (
        TURNS,
        "            self.outage = error\n            raise\n        finally:",
        "            raise\n        finally:",
    ),
    "a dead engine is an agent's failure": (TURNS, "if not isinstance(error, EpisodeFailed):", "if False:"),
    "a limit fails the episode": (EPISODES, "if turns.at_limit or (", "if (False and turns) or ("),
    "there is no last turn": (TURNS, "if self._begun > settings.s_max:", "if False:"),
    "a row outgrows the engine": (TURNS, "settings.max_tokens - most - len(row.tape.token_ids)", "1 << 30"),
    "greedy episodes have a seed": (TURNS, "drawn if self._temperature > 0 else None", "drawn"),
    "a request that is sent again is sampled again": (TURNS, "if row.is_answered(request)", "if False"),
    "a row answers two requests at once": (TURNS, "if row.turn is None or row.turn.done()]", "]"),
    "the shortest row is continued": (TURNS, "row = max(continued,", "row = min(continued,"),
    "a client that goes ends its turn": (TURNS, "await asyncio.shield(row.turn)", "await row.turn"),
    "a summary is trained on": (
        ("rollout/episode.py", "agents/test_rows.py"),
        "[token for tape in rows for token in tape.token_ids]",
        "[token for tape in rows[:1] * len(rows) for token in tape.token_ids]",
    ),
    "rows are one text": (
        ("rollout/episode.py", "agents/test_rows.py"),
        "starts=(0, *itertools.accumulate(lengths[:-1]))",
        "starts=(0,)",
    ),
    "a row is a trajectory's weight": (
        ("learner/plan.py", "learner/test_plan.py"),
        "aggregation=spread(weights[of_chosen]",
        "aggregation=spread(2 * weights[of_chosen]",
    ),
    "any key opens any session": (GATEWAY, "if not has_token(request, key) and", "if False and"),
    "another temperature is taken": (API, "if given != settings.temperature:", "if False:"),
    "fields that are not known are left out": (API, "        if self._given:\n", "        if False:\n"),
    "any token gives episodes": (REMOTE, "if not has_token(request, self._token):", "if False:"),
    "an episode is given to all who ask": (
        REMOTE,
        "                self._waiting.remove(offer)\n                offer",
        "                offer",
    ),
    "who has gone is given an episode": (GATEWAY_REMOTE, "handler_cancellation=True", "handler_cancellation=False"),
    "an episode that has ended is offered": (
        REMOTE,
        "with suppress(ValueError):\n                self._waiting.remove(offer)",
        "pass",
    ),
    "the time begins before anybody takes it": (
        EPISODES,
        "                    if environment.agent is not None:",
        "                    if True:",
    ),
    "episodes of all environments are given": (REMOTE, "environment in (None, offer.task.environment)", "True"),
    "the policy's mistake fails the episode": (EPISODES, "is_the_policys = turns.may_fail", "is_the_policys = False"),
    "every failure is the policy's": (EPISODES, "is_the_policys = turns.may_fail", "is_the_policys = True"),
    "a wrong argument is no mistake": (TURNS, "if not _fit(call.parsed, schemas[call.name]):", "if False:"),
    "arguments that are no object are no mistake": (TURNS, "or not isinstance(call.parsed, dict):", "or False:"),
    "schemas are fetched": (TURNS, "Draft202012Validator(given, registry=Registry())", "Draft202012Validator(given)"),
    "a wrong schema allows nothing": (TURNS, "    Draft202012Validator.check_schema(given)\n", ""),
    "a tool that is not there is no mistake": (TURNS, "if call.name not in schemas or", "if"),
    "tools are not counted before they are tokenised": (TURNS, "0 if known else _length(request.tools)", "0"),
    "calls are not counted before they are tokenised": (TURNS, "sum(len(call.arguments)", "sum(0"),
    "a task that is cancelled at once leaves its coroutine": (EPISODES, "lambda _: work.close()", "lambda _: None"),
    "ids of calls have other lengths": (TURNS, "call{number:03}{i:02}", "call_{number}_{i}"),
    "one call a turn is too few": (TOKENS, "turn.tool_calls[:1])", "turn.tool_calls)"),
    "special tokens are those with a role": (TOKENS, "frozenset((*added, *tokenizer", "frozenset((*[], *tokenizer"),
    "a request that is sent again gets the first's answer": (TURNS, "                row.is_left = True\n", ""),
    "a row that was left stays left": (TURNS, "        row.is_left = False\n", ""),
    "foreign ids are results of other calls": (
        TURNS,
        "_answered_calls(row, request) & self._given",
        "_answered_calls(row, request)",
    ),
    "a new request is taken for an old one": (TURNS, "[] if request.is_first else", "[] if False else"),
    "the same request is answered for ever": (TURNS, "if row.repeated > MOST_REPEATED:", "if False:"),
    "parts of a text stand side by side": (API, 'between: str = "\\n"', 'between: str = ""'),
    "usage ends every stream": (("agents/chat.py", "agents/test_apis.py"), "if request.streams_usage:", "if True:"),
    "an output that stays open is waited for": (
        PROGRAMS,
        "while process.returncode is None:\n            if",
        "while reading[0].done() is False or process.returncode is None:\n            if",
    ),
    "a program inherits secrets": (PROGRAMS, "_SECRET.match(name) or ", ""),
    "a program inherits what it is passed no more": (PROGRAMS, "if name in passes or not", "if not"),
    "a result of Anthropic's is the user's": (
        ("agents/messages.py", "agents/test_apis.py"),
        'yield Message("tool", result, tool_call_id',
        'yield Message("user", result, tool_call_id',
    ),
    "calls of one turn are several": (
        ("agents/responses.py", "agents/test_apis.py"),
        "before = messages.pop() if is_begun else",
        "before =",
    ),
}
