"""The search environment's tags, actions and rendered documents."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cusearch_async.environments import SearchEnvironment
from cusearch_async.environments.search import TAGS, Action, last_answer, parse_action, render_documents
from cusearch_async.types import Segment


@pytest.mark.parametrize(
    ("turn", "action"),
    [
        ("<think>..</think><search>capital of Peru</search>", Action("search", "capital of Peru")),
        ("<think>..</think><answer>Lima</answer>", Action("answer", "Lima")),
        ("<search>\n capital \n of Peru </search>", Action("search", "capital \n of Peru")),
        ("<answer> Łódź </answer><|endoftext|>", Action("answer", "Łódź")),
        ("<search>a</search><answer>b</answer>", Action("search", "a")),
        ("<answer>b</answer><search>a</search>", Action("answer", "b")),
        ("<search>a<search>b</search>", Action("search", "b")),
        ("<search>a<answer>b</answer>", Action("answer", "b")),
        ("<answer>a <search>b</search>", Action("search", "b")),
        ("<answer>Paris <search></answer>", Action("answer", "Paris <search>")),
        ("<search>a</answer></search>", Action("search", "a</answer>")),
        ("<search></search>", Action("search", "")),
        ("<search> \n </search>", Action("search", "")),
        ("<answer></answer>", Action("answer", "")),
        ("<search>a", Action("malformed", "")),
        ("a</search>", Action("malformed", "")),
        ("<search>a</answer>", Action("malformed", "")),
        ("<search>a</searc", Action("malformed", "")),
        ("<SEARCH>a</SEARCH>", Action("malformed", "")),
        ("< search>a</search>", Action("malformed", "")),
        ("<think>I know.</think>", Action("malformed", "")),
        ("<information>a</information>", Action("malformed", "")),
        ("", Action("malformed", "")),
    ],
)
def test_the_first_complete_block_is_what_a_turn_does(turn, action):
    assert parse_action(turn) == action


@given(st.text(max_size=60), st.text(alphabet="abc ?é\n", max_size=20), st.text(max_size=20))
def test_what_follows_the_first_block_changes_nothing(before, query, after):
    before = before.replace("<", "")
    assert parse_action(f"{before}<search>{query}</search>{after}") == Action("search", query.strip())


@given(st.lists(st.sampled_from([*TAGS, "a", " "]), max_size=12))
def test_a_turn_is_judged_as_it_is_played(parts):
    """A turn ends with its first stop tag."""
    turn = "".join(parts)
    ends = [turn.index(tag) + len(tag) for tag in SearchEnvironment.stops if tag in turn]
    turn = turn[: min(ends)] if ends else turn
    action = parse_action(turn)
    assert last_answer([Segment("model", turn)]) == (action.text if action.kind == "answer" else None)


def test_turns_stop_at_the_tags_that_end_an_action():
    assert SearchEnvironment.stops == ("</search>", "</answer>")
    assert set(SearchEnvironment.stops) < set(TAGS)
    assert len(TAGS) == 8


DOC = "Doc {rank}(Title: {title}) {text}\n"


@pytest.mark.parametrize(
    ("documents", "template", "shown"),
    [
        (
            ['"Peru"\nThe capital of Peru is Lima.', '"Lima"\nfirst\nsecond'],
            DOC,
            'Doc 1(Title: "Peru") The capital of Peru is Lima.\nDoc 2(Title: "Lima") first\nsecond\n',
        ),
        (["alone"], DOC, "Doc 1(Title: alone) \n"),  # a single line is the title, as in Search-R1
        (["alone"], "{text}|", "alone|"),  # all text where no title is shown
        (["{rank}\n{title} {} {"], "{title}: {text}", "{rank}: {title} {} {"),  # braces in a document are text
        ([], DOC, ""),
    ],
)
def test_documents_are_numbered_from_one_and_split_in_title_and_text(documents, template, shown):
    assert render_documents(documents, template) == shown
