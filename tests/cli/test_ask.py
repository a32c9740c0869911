"""`cusearch ask`: what it refuses, and what it shows."""

from __future__ import annotations

import argparse
import contextlib
import io
import re

import pytest
from rich.console import Console

from cusearch_async.cli import ask
from cusearch_async.config import Config, load_config
from cusearch_async.errors import RetrievalUnavailable
from cusearch_async.run import folder as run_folder
from cusearch_async.run.history import record_start
from tests.conftest import free_port
from tests.dashboard.test_episodes import Letters, written
from tests.fakes import STARTER


@pytest.fixture
def config(atlas_config, tmp_path):
    url = ["--retriever.url", f"http://127.0.0.1:{free_port()}"]
    config = load_config(atlas_config, ["--run.folder", str(tmp_path / "demo"), *url])
    run_folder.mark(config.folder, config.run.name)
    record_start(config, 1, 0)
    return config


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("What?",), "has no checkpoint yet; name a model with --checkpoint"),
        (("  ", "--checkpoint", "atlas"), "the question must not be blank"),
        (("What?", "--before", "--checkpoint", "./gone"), "--checkpoint './gone' does not exist"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_line(config, cusearch, words, said):
    status, _ = cusearch("ask", str(config.folder), *words)
    assert said in status


def test_a_simulator_of_searches_needs_the_right_answer(config, cusearch):
    words = ("What?", "--checkpoint", str(STARTER), "--retriever.backend", "zerosearch")
    assert "give the right answer as --gold" in cusearch("ask", str(config.folder), *words)[0]


def test_a_folder_of_no_run_is_refused(cusearch, tmp_path):
    assert "is not the folder of a run" in cusearch("ask", str(tmp_path), "What?")[0]


def test_turns_are_shown_without_the_prompt_and_with_the_outcome(monkeypatch):
    monkeypatch.setattr("cusearch_async.models.load_tokenizer", lambda model: Letters())
    out = io.StringIO()
    texts = (
        "Question: ?",
        "<think>a</think>\n<search>b\x1b[31m</search>",
        "\n<information>c</information>\n",
        "<answer>d",
    )
    ask.show(written(*texts), "m", Console(file=out, width=80, color_system=None))
    said = out.getvalue()
    assert "Question" not in said
    assert "<think>a</think><search>b\\u001b[31m</search>\n<information>c</information>\n<answer>d\n" in said
    assert re.search(r"→ .* \(\d searche?s?, (right|wrong)\)", said)


@pytest.mark.parametrize(("sources", "text"), [(("a.jsonl",), "17 * 23 =?"), ((), "17 * 23 =")])
def test_the_question_is_asked_in_the_form_of_those_that_were_trained_on(config, monkeypatch, sources, text):
    """Those of files have a question mark (Search-R1), those that an environment brings stay as they are."""
    found = []
    monkeypatch.setattr(Config, "sources_of", lambda config, label: sources)

    async def asked(served, model, question):
        assert served.environment["search"].reward is None, "it has nothing to score there, and may ask a judge"
        found.append(question.text)

    monkeypatch.setattr(ask, "asked", asked)
    monkeypatch.setattr(ask, "own_retriever", lambda config, *_: contextlib.nullcontext(config))
    parser = argparse.ArgumentParser()
    ask.add(parser)
    given = parser.parse_args([str(config.folder), " 17 * 23 = ", "--checkpoint", str(STARTER)])
    monkeypatch.setattr(ask, "show", lambda *_: None)
    ask.run(given, ["--environment.search.reward", "tests.environments.rewards:half"])
    assert found == [text]


def test_a_retriever_that_does_not_start_is_told_with_its_reason(config):
    broken = config.folder / "config.toml"
    broken.write_text(broken.read_text().replace('corpus = "atlas"', 'corpus = "nowhere.jsonl"'))
    with (
        pytest.raises(RetrievalUnavailable, match=r"did not start: .*nowhere.jsonl"),
        ask.own_retriever(config, config.folder, []),
    ):
        pass


def test_a_retriever_that_refuses_its_config_is_quoted_from_its_first_line(config):
    with (
        pytest.raises(RetrievalUnavailable, match=r"did not start: retriever: episode.turns: unknown key"),
        ask.own_retriever(config, config.folder, ["--episode.turns", "2", "--retriever.top", "3"]),
    ):
        pass


def test_a_retriever_that_is_asked_for_and_silent_is_named(config):
    """Before, one was started, with the address given twice."""
    url = config.retriever.url
    with (
        pytest.raises(RetrievalUnavailable, match=f"^nothing listens at --retriever.url {url}; start a retriever"),
        ask.own_retriever(config, config.folder, ["--retriever.url", url]),
    ):
        pass


def test_a_users_server_that_is_down_is_not_replaced_by_an_embedded_world(config, monkeypatch):
    monkeypatch.setattr(ask, "start_child", lambda *_: pytest.fail("it was started"))
    mine = config.model_copy(update={"data": config.data.model_copy(update={"source": ("mine.jsonl",)})})
    with pytest.raises(RetrievalUnavailable, match="start your server at"), ask.own_retriever(mine, mine.folder, []):
        pass


@pytest.mark.parametrize(
    ("overrides", "is_own"),
    [
        ([], False),
        (["--retriever.corpus", "mine.jsonl"], True),
        (["--retriever.noise=1.0"], True),
        (["--retriever.url", "http://127.0.0.1:9"], False),
    ],
)
def test_a_retriever_with_other_settings_is_the_commands_own(config, monkeypatch, overrides, is_own):
    """Before, one of the run's own settings answered, without a word."""
    started = []

    class Child:
        def terminate(self): ...
        def wait(self): ...

    monkeypatch.setattr(ask, "is_listening", lambda url: True)
    monkeypatch.setattr(ask, "start_child", lambda command, *others: started.append(command) or Child())
    with ask.own_retriever(config, config.folder, overrides) as served:
        assert (served.retriever.url != config.retriever.url) == is_own == bool(started)
    for command in started:
        given = command[command.index("retriever") + 2 :]
        assert given == [*overrides, "--retriever.url", served.retriever.url]
