"""Prompt templates: by name, as text, from a file."""

from __future__ import annotations

import pytest

from cusearch_async.environments.templates import ATLAS, PAPER, Quoted, template_of, template_text
from cusearch_async.errors import ConfigError


def test_the_papers_prompt_holds_the_instructions_and_the_question():
    prompt = PAPER.prompt("Who wrote {this}?")
    assert prompt.text == "Who wrote {this}?"
    assert prompt.before.startswith("Answer the given question. You must conduct reasoning inside <think> and </think>")
    assert prompt.before.endswith("For example, <answer> Beijing </answer>. Question: ")
    assert prompt.after == "\n"


def test_a_template_is_known_by_its_name_its_text_or_a_file(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("Ask\n{question}\n", encoding="utf-8")
    assert (template_of(template_text("paper")), template_of(template_text("atlas"))) == (PAPER, ATLAS)
    assert template_of(template_text("Q: {question} A:")).prompt("Why?") == Quoted("Q: ", "Why?", " A:")
    assert template_of(template_text(str(path))).prompt("Why?") == Quoted("Ask\n", "Why?", "\n")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("mine", r"'mine' is not a template \(paper, atlas\), and there is no such file"),
        ("./mine.txt", r"the template file './mine.txt' cannot be read: No such file"),
        ("$HOME/mine.txt", r"the template file .* cannot be read: .*\$HOME, which only a shell replaces"),
        ("Who is it?", r"the prompt 'Who is it\?' is no file, and must contain \{question\}, where the question is"),
        ("{question} {question}", r"must contain \{question\} once, '.*' contains it 2 times"),
        ("nul\0", "cannot be read: embedded null byte"),
    ],
)
def test_what_is_no_template_is_refused(value, message):
    with pytest.raises(ConfigError, match=message):
        template_text(value)


def test_a_file_without_a_place_for_the_question_is_refused(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("Ask", encoding="utf-8")
    with pytest.raises(ConfigError, match="contains it 0 times"):
        template_text(str(path))
