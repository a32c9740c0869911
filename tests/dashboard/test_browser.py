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
    """A step that was done closed opened episodes and reset the filters."""
    script = """
      take({ rows: { step: [3], values: {} } });
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


PLOTS = """
  const made = [], Plot = uPlot;
  uPlot = Object.assign(function (...given) { const plot = new Plot(...given); made.push(plot); return plot; }, Plot);
  const waiting = [];
  requestAnimationFrame = (draws) => waiting.push(draws);
  const settle = () => made.forEach((plot) => plot.batch(() => {}));
  const drawNow = () => { waiting.splice(0).forEach((draws) => draws()); settle(); };
"""


def test_stacked_areas_begin_at_zero(data, tmp_path):
    """From 36 to 84 a wait of 40 s was a sliver, and an update of 20 s five times as large."""
    data["rows"]["values"] |= {"time/wait_s": [40, 44, 41], "time/update_s": [20, 26, 25]}
    script = """
      show();
      drawNow();
      const plot = made.find((one) => one.root.closest("section").textContent.startsWith(CHARTS.time.title));
      return [plot.scales.y.min, plot.scales.y.max > 70];
    """
    assert answer_of(PLOTS + script, tmp_path, data, "machines") == [0, True]


def test_a_chart_stays_zoomed_and_its_curves_hidden_when_a_step_is_done(data, tmp_path):
    """It was drawn anew in each step of some seconds."""
    script = """
      show();
      drawNow();
      const of = (title) => made.filter((one) => one.root.closest("section")?.textContent.startsWith(title)).at(-1);
      const title = CHARTS.reward.title;
      of(title).setScale("x", { min: 0, max: 1 });
      of(title).setSeries(1, { show: false });
      settle();
      take({ rows: { step: [3], values: {} } });
      drawNow();
      const zoomed = [of(title).scales.x.max, of(title).series[1].show, of(title).series[2].show];
      of(title).setScale("x", { min: 0, max: 3 });
      settle();
      take({ rows: { step: [4], values: {} } });
      drawNow();
      return [...zoomed, of(title).scales.x.max];
    """
    assert answer_of(PLOTS + script, tmp_path, data, "learning") == [1, False, True, 4]


def test_a_hidden_page_follows_nothing_and_catches_up_when_it_is_shown(data, tmp_path):
    """Six tabs held all of a browser's connections to the server, and read Redis for days."""
    script = """
      data.watches = true;
      const streams = [];
      EventSource = class {
        constructor(url) { this.url = url; streams.push(this); }
        close() { this.isClosed = true; }
      };
      const turn = (hidden) => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
      };
      leave();
      turn(false);
      turn(true);
      turn(false);
      return [streams.length, streams[0].isClosed, Boolean(streams[1].isClosed), streams[1].url.includes("from=3")];
    """
    assert answer_of(script, tmp_path, data) == [2, True, False, True]


def test_a_second_click_asks_for_nothing(data, tmp_path):
    """The second answer, that the ticket is not leased, was red though it had been requeued."""
    script = """
      let asked = 0;
      fetch = () => { asked += 1; return new Promise(() => {}); };
      const requeue = [...makeChangePanel().querySelectorAll("button")].find((one) => one.textContent === "requeue");
      requeue.click();
      requeue.click();
      return asked;
    """
    assert answer_of(script, tmp_path, data) == 1
