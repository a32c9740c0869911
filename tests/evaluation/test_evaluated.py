"""`cusearch eval` from its passes to the report: each pass stands for what it is."""

from __future__ import annotations

import argparse
import json

import pytest

from cusearch_async.cli import eval as evaluate
from cusearch_async.cli.eval import evaluated
from cusearch_async.config import load_config
from cusearch_async.errors import ConfigError, JudgeFailed
from cusearch_async.evaluation.probing import ProbedSearch, run_passes
from tests.dashboard.test_episodes import Letters
from tests.evaluation import planted
from tests.evaluation.planted import QUESTIONS, Engine, PlantedRunner
from tests.evaluation.test_judge import NO_MODEL, judging, reply

FEW = QUESTIONS[:60]
ENGINE = "bm25 over 2 passages (1)"
POLICIES = {"m": planted.reads, "other": planted.abstains}


class Running:
    """Runs planted policies, and keeps what it was asked for."""

    def __init__(self, engine=None) -> None:
        self._engine = engine or Engine()
        self.asked = []

    async def __call__(self, model, passes):
        self.asked.append((model, [(one.mode, one.temperature) for one in passes]))
        probed = ProbedSearch(self._engine)
        return await run_passes(PlantedRunner(POLICIES[model], probed), probed, passes, 8)


def asked_for(**changes):
    plain = {"temperature": 0.0, "samples": 0, "probe": False, "against": None, "output": None, "checkpoint": None}
    return argparse.Namespace(**plain | changes)


async def report_of(atlas_config, running=None, overrides=(), **changes):
    config = load_config(atlas_config, ["--episode.temperature", "0.7", *overrides])
    return await evaluated(config, "m", asked_for(**changes), FEW, ENGINE, running or Running())


async def test_plainly_one_greedy_pass_is_run(atlas_config):
    running = Running()
    report = await report_of(atlas_config, running)
    assert running.asked == [("m", [("full", 0.0)])]
    assert report.scores["all"]["em"] == 1.0
    assert report.recall == 1.0
    assert (report.samples, report.probes, report.found, report.against, report.verdicts) == (None, {}, [], None, None)
    assert report.title == "m: 60 questions of atlas, greedy"
    assert report.lines()[0].startswith("model m, suite atlas, questions 60 (")


async def test_each_probe_is_scored_as_what_it_is(atlas_config):
    """With a leak the policy is right with blocked evidence, and not closed-book."""
    running = Running(Engine(leaks=True))
    report = await report_of(atlas_config, running, probe=True)
    (_, passes), = running.asked  # fmt: skip
    assert passes == [("full", 0.0), ("closed", 0.0), ("blocked", 0.0), *[("full", 0.7)] * 4]
    assert {mode: scores["all"]["em"] for mode, scores in report.probes.items()} == {"closed": 0.0, "blocked": 1.0}
    helps, leaks = report.found
    assert helps.startswith("searching helps: EM 1.000 with the engine, 0.000 without")
    assert leaks.startswith("the engine leaks answers")
    assert report.samples.k == 4


UNASKED = [
    word
    for key, value in {"name": "agent", "agent": "mine:answer", "searches": "false"}.items()
    for word in (f"--environment.search.{key}", value)
]


async def test_an_environment_that_asks_no_retriever_has_no_recall_and_nothing_to_probe(atlas_config):
    """Before, three equal passes said that searching does not help."""
    report = await report_of(atlas_config, overrides=UNASKED)
    assert report.recall is None
    with pytest.raises(ConfigError, match=r"--probe compares .* environment\.search asks none"):
        await evaluate.scored(load_config(atlas_config, UNASKED), "m", asked_for(probe=True))


async def test_samples_are_none_of_the_probes(atlas_config):
    """Every sample of a policy that reads is right, and no closed or blocked episode is."""
    for probe in (False, True):
        report = await report_of(atlas_config, probe=probe, samples=6)
        assert (report.samples.k, report.samples.pass_at_1, report.samples.abstain_share) == (6, 1.0, 0.0)
        assert report.conditions["samples_temperature"] == 0.7


async def test_another_model_is_run_on_the_same_questions_and_compared(atlas_config):
    running = Running()
    report = await report_of(atlas_config, running, against="other", temperature=0.5)
    assert running.asked == [("m", [("full", 0.5)]), ("other", [("full", 0.5)])]
    assert (report.against.only_first, report.against.only_second, report.against.difference) == (60, 0, 1.0)
    assert report.as_json()["conditions"]["against"] == "other"
    assert report.lines()[1].startswith("retrieval recall")
    assert report.lines()[2].startswith("less other: EM +1.000")


async def test_a_judge_is_asked_about_the_greedy_episodes(atlas_config):
    async with judging(reply("no")) as (settings, service):
        report = await report_of(atlas_config, overrides=["--eval.judge.url", settings.url], samples=2)
    assert (report.verdicts.right, report.verdicts.agrees_with_em) == (0.0, 0.0)
    assert len(service.requests) == 60


async def test_a_judge_that_fails_later_loses_no_scores(atlas_config):
    async with judging(reply("yes"), NO_MODEL) as (settings, _):
        report = await report_of(atlas_config, overrides=["--eval.judge.url", settings.url])
    assert report.scores["all"]["em"] == 1.0
    assert report.verdicts is None
    assert "no such model" in report.judge_failed


def test_scores_are_written_and_printed_before_a_judges_failure_ends_the_command(
    atlas_config, tmp_path, monkeypatch, capsys
):
    async def scored(config, model, arguments):
        return await evaluated(config, "m", arguments, FEW, ENGINE, failing)

    async def failing(model, passes):
        results = await Running()(model, passes)
        monkeypatch.setattr("cusearch_async.evaluation.judge.judge", fails)
        return results

    async def fails(settings, episodes):
        raise JudgeFailed("the judge has gone")

    monkeypatch.setattr(evaluate, "scored", scored)
    monkeypatch.setattr("cusearch_async.models.load_tokenizer", lambda *_: Letters())
    output = tmp_path / "scores.json"
    arguments = asked_for(config=[atlas_config], suite=None, output=output)
    with pytest.raises(JudgeFailed, match="the judge has gone"):
        evaluate.run(arguments, ["--eval.judge.url", "http://127.0.0.1:1/v1"])
    assert json.loads(output.read_text())["scores"]["all"]["em"] == 1.0
    assert json.loads(output.read_text())["judge"] == {"failed": "the judge has gone"}
    assert "no verdicts: the judge has gone" in capsys.readouterr().out


async def test_the_report_says_which_metric_it_uses(atlas_config):
    report = await report_of(atlas_config, overrides=["--environment.search.metric", "strict"], samples=2)
    assert report.conditions["metric"] == "'strict'"
    assert "metric 'strict'" in report.lines()[0]
