"""The page's script in a browser: what it computes, and what it leaves alone while somebody reads or types."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binomtest

from cusearch_async.dashboard.facts import facts
from cusearch_async.dashboard.kept import KeptRun
from cusearch_async.dashboard.page import asset, page
from tests.dashboard.browser import CHROMIUM, in_browser
from tests.dashboard.conftest import add_step

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: `make setup-browser` installs it"),
]


def answer_of(script: str, folder: Path, page_of: dict[str, Any] | None = None, screen: str = "now") -> Any:
    """The value that `script` returns in the page of `page_of`, or in an empty one."""
    text = page("demo", page_of) if page_of else "<html><head><title></title></head><body>"
    nonce = "".join(re.findall(r"nonce-([\w-]+)", text))  # of the scripts that the page allows
    whole = f"<script nonce='{nonce}'>document.title = JSON.stringify((() => {{ {script} }})());</script>"
    file = folder / "test.html"
    file.write_text(text + whole, encoding="utf-8")
    document = in_browser(f"{file.as_uri()}#{screen}", folder, "1000,800")
    return json.loads(re.findall(r"<title>(.*)</title>", document)[0].replace("&amp;", "&"))


@pytest.fixture
def data(config) -> dict[str, Any]:
    for step in range(3):
        add_step(config, step)
    return facts(KeptRun.read(config.folder)) | {"watches": False}


def test_the_sign_test_is_exact_with_thousands_of_questions_too(tmp_path):
    """2 ** -n is 0 from 1,075 on; before, two equal policies then had p = 0."""
    counts = [(0, 0), (3, 1), (5, 20), (500, 500), (600, 600), (600, 690), (3000, 2990)]
    source = re.search(r"^function signTest.*?^}", asset("page.js"), re.MULTILINE | re.DOTALL)
    found = answer_of(f"{source[0]}\nreturn {json.dumps(counts)}.map(([a, b]) => signTest(a, b));", tmp_path)
    exact = [binomtest(one, one + other).pvalue if one + other else 1.0 for one, other in counts]
    assert found == pytest.approx(exact, rel=1e-9)


def test_the_baseline_of_a_demo_is_no_point_of_its_curve(data, tmp_path):
    """It has the step of the start, and took its place."""
    sides = (("the start", 0, 0.44), ("the end", 3, 0.6), ("the baseline", 0, 0.05))
    data["scores"] = [{"what": what, "step": step, "categories": {"all": {"em": em}}} for what, step, em in sides]
    assert answer_of("return [axis(), heldOut('em')];", tmp_path, data) == [[0, 1, 2, 3], [0.44, None, None, 0.6]]


FOLLOWED = """
  const streams = [];
  EventSource = class { constructor() { streams.push(this); } close() {} };
  const drawn = () => document.getElementById("main").firstChild;
  const before = drawn();
  follow();
"""


@pytest.mark.parametrize(
    ("screen", "stays"), [("episodes", True), ("settings", True), ("heldout", True), ("now", False)]
)
def test_what_is_read_at_leisure_is_not_drawn_again_by_news(data, tmp_path, screen, stays):
    """Leaving the tab for some seconds closed opened episodes and reset the filters."""
    script = """
      Object.defineProperty(document, "hidden", { value: true, configurable: true });
      take({ rows: { step: [3], values: {} } });
      Object.defineProperty(document, "hidden", { value: false, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
      return [data.rows.step.length, drawn() === before];
    """
    assert answer_of(FOLLOWED + script, tmp_path, data, screen) == [4, stays]


def test_what_redis_holds_draws_no_chart_again(data, tmp_path):
    """Every 2 s the charts beside the workers lost the place that was pointed at."""
    script = """
      const panels = () => [...document.getElementById("main").children];
      const live = { problem: "Redis does not answer" };
      take({ live });
      const first = panels();
      take({ live: { ...live } });
      return [first.length > 0, panels().every((one, place) => one === first[place])];
    """
    assert answer_of(script, tmp_path, data, "machines") == [True, True]


@pytest.mark.parametrize(("groups_of", "asked"), [(2, "step/2"), (1, "step/3")])
def test_episodes_of_a_step_that_was_made_again_or_pruned_are_read_anew(data, tmp_path, groups_of, asked):
    script = f"""
      const asked = [];
      fetch = (path) => {{ asked.push(path); return new Promise(() => {{}}); }};
      const groups = {{ step: {groups_of}, groups: [], colours: {{}} }};
      Object.assign(data, {{ watches: true, recorded: [2, 3], groups }});
      shownStep = {groups_of};
      if ({groups_of} === 2) take({{ rows: {{ step: [0, 1, 2], values: {{}} }}, reset: true }});
      show();
      return [asked[0], Number(document.querySelector("select").value)];
    """
    assert answer_of(script, tmp_path, data, "episodes") == [asked, int(asked[-1])]


@pytest.mark.parametrize("screen", ["episodes", "now"])
def test_a_server_that_has_ended_is_told_of_once(data, tmp_path, screen):
    """With each attempt, every 5 s, the whole screen was drawn again."""
    script = """
      streams[0].onerror();
      const [told, first] = [document.getElementById("head").textContent, drawn()];
      streams[0].onerror();
      return [told.includes("does not answer"), first === before, drawn() === first];
    """
    data["progress"]["outcome"] = "running"
    assert answer_of(FOLLOWED + script, tmp_path, data, screen) == [True, screen == "episodes", True]


def test_a_field_that_is_typed_into_keeps_its_place_while_steps_go_by(data, tmp_path):
    script = """
      changing = makeChangePanel();
      SCREENS.now[1] = () => [changing];
      show();
      const field = changing.querySelector("input");
      field.focus();
      field.value = "abc";
      field.setSelectionRange(1, 2);
      show();
      return [document.activeElement === field, field.selectionStart, field.selectionEnd];
    """
    assert answer_of(script, tmp_path, data) == [True, 1, 2]
