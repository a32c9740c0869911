"""The rendered prompt holds the question, and begins and ends as the model's own files say."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from cusearch_async.config import EpisodeConfig
from cusearch_async.environments import NoSearch, Quoted
from cusearch_async.errors import ConfigError, EpisodeFailed
from cusearch_async.rollout.episode import EpisodeRunner
from cusearch_async.rollout.prompting import (
    NO_ARGUMENTS,
    apply_template,
    build_prompt,
    check_lengths,
    check_template,
    generation_prompt,
)
from cusearch_async.types import Question
from tests.fakes import STARTER, FakeSearch, ScriptedPolicy, searching

PARTS = "{% for m in messages %}<u>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}<a>"
SWITCH = (
    "{% for m in messages %}<u>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
THINKS = "{% for m in messages %}<u>{{ m.content }}{% endfor %}<a>{{ '\n<think>\n' }}"
CUTS = "{% for m in messages %}<u>{{ m.content.split('</think>')[-1] }}{% endfor %}<a>"
ASKED = Quoted("Question: ", "Who wrote it?", "\n")
QUESTION = Question(id="q/1", text="Who wrote it?", answers=("Lima",), category="x")


def tokenizer_with(chat_template: str | None) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(STARTER)
    tokenizer.chat_template = chat_template
    return tokenizer


def rendered(chat_template: str, **arguments: Any) -> str:
    tokenizer = tokenizer_with(chat_template)
    return str(tokenizer.decode(build_prompt(tokenizer, ASKED, arguments)))


@pytest.mark.parametrize(
    "template", [PARTS, PARTS.replace("p.text", "p['text'] | trim"), "{{ messages[0].content[0].text }}"]
)
def test_a_template_that_wants_parts_gets_them(template):
    assert "Question: Who wrote it?" in rendered(template)


def test_a_template_that_refuses_text_gets_parts():
    refuses = "{% if m is string %}{{ raise_exception('parts, please') }}{% endif %}"
    template = "{% set m = messages[0].content %}" + refuses + "<u>{{ m[0].text }}<a>"
    assert "Who wrote it?" in rendered(template)


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("<a>", "atlas"),
        ("{{ messages[0].content[:4] }}", "atlas"),
        ("{{ messages[0].role }}", "atlas"),
        (CUTS, "paper"),
    ],
)
def test_a_template_that_drops_the_question_or_the_instructions_is_refused_at_the_start(template, prompt):
    tokenizer, environments = tokenizer_with(template), searching(NoSearch(), prompt)
    for check in (
        lambda: check_template(environments, tokenizer),
        lambda: check_lengths([QUESTION], environments, tokenizer, EpisodeConfig()),
        lambda: EpisodeRunner(ScriptedPolicy(tokenizer, []), environments, tokenizer, EpisodeConfig(), 0),
    ):
        with pytest.raises(ConfigError, match=rf"the chat template of '{STARTER}' drops the question, or a part of"):
            check()


def test_a_template_that_drops_only_some_questions_fails_their_episodes():
    tokenizer = tokenizer_with("{% if 'Peru' not in messages[0].content %}{{ messages[0].content }}{% endif %}<a>")
    check_template(searching(NoSearch()), tokenizer)
    with pytest.raises(EpisodeFailed, match="drops the question"):
        build_prompt(tokenizer, Quoted("Question: ", "Where is Peru?", "\n"))


def test_a_template_that_fails_is_refused_with_its_reason():
    with pytest.raises(ConfigError, match=r"the chat template of .* cannot be used: two messages, please; correct it"):
        check_template(searching(NoSearch()), tokenizer_with("{{ raise_exception('two messages, please') }}"))


def test_templates_may_quote_or_capitalise():
    for template in ("{{ messages[0].content | upper }}", "{{ messages[0].content | tojson }}"):
        check_template(searching(NoSearch()), tokenizer_with(template))


def test_arguments_reach_the_template():
    assert rendered(SWITCH).endswith("<a>")
    assert rendered(SWITCH, enable_thinking=False).endswith("<a><think></think>")


def test_an_argument_that_the_template_does_not_have_is_refused():
    with pytest.raises(ConfigError, match=r"model\.chat_template\.enable_thinkin: the chat template of .* has no such"):
        check_template(searching(NoSearch()), tokenizer_with(SWITCH), {"enable_thinkin": False})
    with pytest.raises(ConfigError, match=r"model\.chat_template\.enable_thinking: .* has no chat template; remove it"):
        check_template(searching(NoSearch()), tokenizer_with(None), {"enable_thinking": False})


def test_a_template_that_is_not_to_be_used_is_not():
    """Not by a prompt, and not by what the first turn begins with."""
    plain = build_prompt(tokenizer_with(None), ASKED)
    chat = tokenizer_with(SWITCH)
    assert build_prompt(chat, ASKED, None) == plain != build_prompt(chat, ASKED)
    assert (generation_prompt(chat, None), generation_prompt(chat, {})) == ("", "<a>")
    check_template(searching(NoSearch()), tokenizer_with("{{ broken"), None)


def test_a_raw_prompt_begins_with_what_the_tokenizer_puts_first():
    tokenizer = tokenizer_with(None)
    raw = build_prompt(tokenizer, ASKED)
    tokenizer.add_special_tokens({"bos_token": "<bos>", "eos_token": "<eos>"})
    bos, eos = tokenizer.convert_tokens_to_ids(["<bos>", "<eos>"])
    ends = TemplateProcessing(single="<bos> $A <eos>", special_tokens=[("<bos>", bos), ("<eos>", eos)])
    tokenizer.backend_tokenizer.post_processor = ends
    assert tokenizer("x")["input_ids"][0] == bos
    with_bos = tokenizer_with(None)
    with_bos._tokenizer = tokenizer.backend_tokenizer
    assert build_prompt(with_bos, ASKED) == [bos, *raw]
    assert build_prompt(with_bos, Quoted("Question: ", "Who? <bos>", "\n"))[0] == bos
    with_bos.chat_template = "{{ messages[0].content }}<a>"
    assert build_prompt(with_bos, ASKED)[0] != bos, "a chat template writes its own"


# An open <think> in the prompt belongs to the first turn.


async def format_of(turns: list[str], template: str | None, prompt: str = "atlas", **arguments: Any) -> bool:
    tokenizer = tokenizer_with(template)
    search = FakeSearch({"x": ["Lima is in Peru."]})
    runner = EpisodeRunner(
        ScriptedPolicy(tokenizer, turns), searching(search, prompt), tokenizer, EpisodeConfig(), 0, arguments
    )
    return (await runner.run(QUESTION, ticket=0, rollout=0, worker="w")).format_valid


FIRST, NEXT = "I look.</think><search>x</search>", "<think>Found.</think><answer>Lima</answer>"


@pytest.mark.parametrize(
    ("template", "prompt"), [(THINKS, "atlas"), (THINKS.replace("\n", " "), "paper"), (None, "{question}\n<think>\n")]
)
async def test_the_first_turn_continues_a_thought_that_the_prompt_has_begun(template, prompt):
    assert await format_of([FIRST, NEXT], template, prompt)
    assert await format_of(["So.</think><answer>Lima</answer>"], template, prompt)
    assert not await format_of(["<think>" + FIRST, NEXT], template, prompt), "it would be begun twice"
    assert not await format_of([FIRST, NEXT.removeprefix("<think>")], template, prompt), "in the first turn only"


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (SWITCH, "atlas"),
        (THINKS + "</think>", "atlas"),
        (SWITCH, "{question} Begin with <think>"),
        (None, "Begin with <think> here: {question}\n"),
    ],
)
async def test_no_thought_is_begun_by_a_closed_one_or_by_the_users_text(template, prompt):
    assert not await format_of([FIRST, NEXT], template, prompt)
    assert await format_of(["<think>" + FIRST, NEXT], template, prompt)


def test_the_generation_prompt_is_what_follows_the_question():
    assert generation_prompt(tokenizer_with(THINKS), {}) == "<a>\n<think>\n"
    assert generation_prompt(tokenizer_with("{{ messages[0].content | upper }}<a>"), {}) == "<a>"
    assert generation_prompt(tokenizer_with(None), {}) == ""


def test_a_template_that_prints_the_date_makes_one_prompt_on_every_day(monkeypatch):
    """Recorded trajectories were "of another template" the next day, and siblings differed over midnight."""
    tokenizer = AutoTokenizer.from_pretrained(STARTER)
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}\n{% for m in messages %}{{ m.content }}{% endfor %}"
    assert apply_template(tokenizer, [{"role": "user", "content": "Who?"}], NO_ARGUMENTS) == "26 Jul 2024\nWho?"
