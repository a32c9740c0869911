"""An agent that uses the openai client as it is, trained through the whole loop; tool calls read by vLLM's parsers."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from cusearch_async.agents.parsing import parser_of
from cusearch_async.environments.agent import AgentSettings
from cusearch_async.errors import ConfigError
from tests.agents.templates import chat_starter, chat_tokenizer
from tests.agents.test_sdks import PYTHON as SDKS_PYTHON
from tests.conftest import free_port, wait_until
from tests.system.conftest import Run, finish
from tests.system.forked import Command

pytestmark = pytest.mark.system

TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}]
HF = {"parser": "hf", "reasoning_parser": "hf"}
"""The policy of the demo says in its tokenizer's settings how it writes."""
PROGRAM = json.dumps([sys.executable, "-m", "docs.examples.program"])
SDKS = Path(__file__).parents[1] / "agents" / "sdks"


def of_sdk(name: str) -> Any:
    command = json.dumps([str(SDKS_PYTHON), str(SDKS / name)])
    marks = [pytest.mark.slow, pytest.mark.skipif(not SDKS_PYTHON.exists(), reason="make setup-sdks")]
    return pytest.param({"command": command, **HF}, marks=marks, id=name)


@pytest.mark.parametrize(
    "how",
    [
        {"agent": "docs.examples.agent:answer", **HF},
        pytest.param({"command": PROGRAM}, marks=pytest.mark.slow),
        pytest.param({"remote": "http://127.0.0.1:{port}"}, marks=pytest.mark.slow),
        of_sdk("with_openai_agents.py"),
        of_sdk("with_anthropic.py"),
    ],
    ids=lambda how: next(iter(how)),
)
def test_an_agents_episodes_are_token_exact_on_policy(run: Run, tmp_path: Path, how: dict[str, str], monkeypatch):
    """With max_staleness = 0 the engine computes what the learner computes, also after weights came back: no token was
    made again from text. Each way is the example of docs/agents.md, or an agent of an SDK."""
    address = how.get("remote", "").format(port=free_port())
    if address:
        how = {"remote": address}
        monkeypatch.setenv("CUSEARCH_AGENTS_TOKEN", "of this test")
        run.started.append(Command(("docs.examples.remote", address, "8"), tmp_path / "elsewhere.log", {}))
    run.overrides |= {"model.path": chat_starter(tmp_path / "model"), "model.dtype": "float32", "pool.max_staleness": 0}
    run.overrides |= {"environment.search.name": "agent"}
    run.overrides |= {f"environment.search.{name}": value for name, value in how.items()}
    status, output = finish(run.cusearch("launch", run__steps=2))
    assert status == 0, output
    rows = run.metrics()
    assert [row["step"] for row in rows] == [0, 1]
    for row in rows:
        assert row["train/tokens"] > 0
        assert row["off_policy/logprob_difference_max"] < 1e-3
        assert row["depth/mean"] > 0.5, "its searches are counted"
        assert row["buffer/failed_rollouts"] == 0
    assert rows[0]["train/grad_norm"] > 0
    assert "loaded weights v000001-e1" in run.log("rollout-0")
    assert run.processes() == []
    if "agent" in how:  # the function: the newest checkpoint is scored through it, too
        run.worker("retriever")
        status, output = finish(run.cusearch("eval", eval__limit=4))
        assert status == 0, output
        assert re.search(r"^all +10 +0\.\d", output, re.MULTILINE), output


@pytest.mark.slow
def test_an_agent_that_fails_is_named_by_the_worker(run: Run, tmp_path: Path):
    run.overrides |= {"model.path": chat_starter(tmp_path / "model")}
    run.overrides |= {"environment.search.name": "agent", "environment.search.agent": "tests.agents.programs:fails"}
    run.cusearch("redis")
    run.worker("retriever")
    run.worker("learner", run__steps=1)
    log = Path(run.worker("rollout").log)
    wait_until(
        lambda: "the agent tests.agents.programs:fails failed: KeyError: 'no such thing'" in log.read_text(), 150
    )


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("hermes", 'So.<tool_call>\n{"name": "search", "arguments": {"query": "Pé"}}\n</tool_call>', "So."),
        ("pythonic", '[search(query="Pé")]', ""),
    ],
)
def test_vllms_parsers_read_the_policys_calls(name: str, text: str, content: str):
    parse = parser_of("x", AgentSettings(name="agent", parser=name), chat_tokenizer(), None)
    said, calls, thoughts = parse((), text, TOOLS)
    assert (said.strip(), thoughts) == (content, "")
    assert [(called, json.loads(arguments)) for called, arguments in calls] == [("search", {"query": "Pé"})]
    assert parse((), "Just words.", TOOLS) == ("Just words.", [], "")


def test_vllms_parsers_read_the_policys_thoughts():
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    for name in ("qwen3", "deepseek_r1"):
        parse = parser_of("x", AgentSettings(name="agent", reasoning_parser=name), tokenizer, None)
        call = '<tool_call>\n{"name": "search", "arguments": {"query": "Pé"}}\n</tool_call>'
        text, calls, thoughts = parse((), f"<think>Hm.</think>So.{call}", TOOLS)
        assert (text.strip(), [called for called, _ in calls], thoughts.strip()) == ("So.", ["search"], "Hm.")
        assert parse((), "<think>Hm.</think>5", ()) == ("5", [], "Hm.")
        assert parse((), "<think>cut", ()).text == "", name


def test_a_turn_does_not_read_the_whole_vocabulary(monkeypatch: pytest.MonkeyPatch):
    tokenizer, reads = chat_tokenizer(), []
    tokenizer.add_tokens(["<think>", "</think>"])
    get_vocab = type(tokenizer).get_vocab
    monkeypatch.setattr(type(tokenizer), "get_vocab", lambda own: reads.append(own) or get_vocab(own))
    parse = parser_of("x", AgentSettings(name="agent", reasoning_parser="qwen3"), tokenizer, None)
    before = len(reads)
    assert parse((), "<think>Hm.</think>5", TOOLS).thoughts == "Hm."
    assert len(reads) == before


def test_all_of_vllms_parsers_can_be_loaded():
    """Their imports are those of vLLM's server, of which the pinned lists have a part."""
    for manager, get in (
        (ToolParserManager, ToolParserManager.get_tool_parser),
        (ReasoningParserManager, ReasoningParserManager.get_reasoning_parser),
    ):
        for name in manager.list_registered():
            get(name)


def test_a_parser_that_vllm_does_not_have_or_that_is_of_another_model_is_refused():
    def refused(**own: str):
        parser_of("x", AgentSettings(name="agent", **own), chat_tokenizer(), None)

    with pytest.raises(
        ConfigError, match=r"environment.x.parser 'llama3_json': vLLM's parsers are not for this model: .*token"
    ):
        refused(parser="llama3_json")
    with pytest.raises(ConfigError, match=r"environment.x.parser: vLLM has no parser 'mine'; it has .*hermes"):
        refused(parser="mine")
    with pytest.raises(ConfigError, match=r"environment.x.reasoning_parser: vLLM has no parser 'mine'; .*qwen3"):
        refused(reasoning_parser="mine")
    with pytest.raises(
        ConfigError, match=r"environment.x.reasoning_parser 'mistral': vLLM's parsers are not for this model"
    ):
        refused(reasoning_parser="mistral")
