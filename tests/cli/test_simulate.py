"""`cusearch simulate`: what it takes times from, what it shows, and what it refuses."""

from __future__ import annotations

import argparse
import json
import re

import numpy as np
import pytest

from cusearch_async.cli import simulate
from cusearch_async.config import load_config
from cusearch_async.errors import ConfigError
from cusearch_async.run import folder as run_folder
from cusearch_async.simulation.durations import recorded_durations
from cusearch_async.training.recorder import Recorder
from cusearch_async.training.selector import Selector, initial_method_state
from cusearch_async.types import Pool
from tests.strategies import make_trajectory
from tests.training.learners import QUESTIONS

SMALL = ("--pool.questions", "4", "--pool.rollouts", "2", "--method.budget", "4", "--loss.minibatch", "4")
TIMES = ("--episode-s", "6,15", "--update-s", "8", "--workers", "2")


@pytest.fixture
async def recorded_run(atlas_config, tmp_path):
    """Two steps: their records and rows of metrics."""
    config = load_config(atlas_config, [*SMALL, "--run.folder", str(tmp_path / "run")])
    run_folder.mark(config.folder, config.run.name)
    selector = Selector(config, QUESTIONS, initial_method_state(config.method, config.episode.s_max))
    rows = []
    async with Recorder(config.folder, config.run.records_mib, 1) as recorder:
        for step in range(2):
            trajectories = [make_trajectory(step * 4 + i // 2, i % 2, depth=2, episode_s=3.0 + i) for i in range(8)]
            recorder.write(selector.choose(Pool(step, tuple(trajectories))))
            await recorder.finish()
            times = {"time/update_s": 5.0 + step, "time/publish_s": 0.5, "time/publishing_s": 2.0}
            rows.append({"step": step, "epoch": 1, **times, "rollout/weight_load_s": 3.0, "rollout/workers": 2})
    (config.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config


async def test_times_come_from_the_records_and_rows_of_a_run(recorded_run):
    found = recorded_durations(recorded_run.folder, recorded_run)
    assert sorted(found.episode_s) == sorted(2 * [*np.arange(3.0, 11.0)])
    assert (found.searches, found.publish_s, found.load_s) == (2, 2, 1.5)
    assert found.stands_s == 0, "the recorded times of episodes have it"
    assert [*found.update_s] == [5.5, 6.5]


async def test_a_record_that_is_half_written_is_left_out(recorded_run, caplog):
    """As after a crash of the machine."""
    (recorded_run.folder / "records" / "000001-e1.zz").write_bytes(b"half")
    assert len(recorded_durations(recorded_run.folder, recorded_run).episode_s) == 8
    assert "the record of step 1 in" in caplog.text
    (recorded_run.folder / "records" / "000000-e1.zz").write_bytes(b"half")
    with pytest.raises(ConfigError, match=r"none of the records in .* can be read"):
        recorded_durations(recorded_run.folder, recorded_run)


@pytest.mark.parametrize(
    ("options", "stands_s"),
    [
        ((), 0.0),
        (("--load-s", "4"), 2.5),
        (("--load-s", "1"), 0.0),
        (("--episode-s", "6,15"), 1.5),
        (("--episode-s", "6,15", "--load-s", "4"), 4.0),
    ],
)
async def test_an_engine_stands_still_for_what_recorded_episodes_do_not_have(recorded_run, options, stands_s):
    parser = argparse.ArgumentParser()
    simulate.add(parser)
    given = parser.parse_args(["atlas", "--from", str(recorded_run.folder), *options])
    assert simulate._durations(given, recorded_run).stands_s == stands_s


@pytest.mark.parametrize("missing", ["records", "metrics.jsonl"])
async def test_a_run_without_steps_or_records_is_refused(recorded_run, missing):
    (recorded_run.folder / missing).rename(recorded_run.folder / "elsewhere")
    with pytest.raises(ConfigError, match=r"has no (steps|records \(run\.records_mib\)) to take times from"):
        recorded_durations(recorded_run.folder, recorded_run)


def test_the_table_has_the_run_as_it_is_and_what_would_make_it_wait_less(cusearch, atlas_config, tmp_path):
    output = tmp_path / "figures.json"
    status, text = cusearch("simulate", str(atlas_config), *TIMES, *SMALL, "--output", str(output))
    assert status == 0
    assert "seconds: an episode 6.0, 99 % below 15.0; an update 8.0, publishing 1.0, loading 0.5" in text
    rows = json.loads(output.read_text())
    assert [row["pool"] for row in rows] == ["as configured", "max_staleness 3", "deferred", "deferred, hedged"]
    assert [row["staleness_max"] for row in rows] <= [2, 3, 4, 4]
    assert re.search(r"^ +2 +as configured +\d+\.\d", text, re.MULTILINE)
    assert f"as configured, 2 workers: {rows[0]['binds']}" in text


def test_more_workers_are_advised_only_where_they_make_it_faster(cusearch, atlas_config):
    """Workers that hedge are full however many there are: 12 were told that more would make it faster."""
    pool = ("--pool.questions", "16", "--pool.rollouts", "2", "--method.budget", "16", "--loss.minibatch", "16")
    hedged = ("--pool.order", "deferred", "--pool.hedge_after_s", "20", "--rollout.max_episodes", "8")
    times = ("--episode-s", "30,90", "--update-s", "8", "--workers", "3,12")
    status, text = cusearch("simulate", str(atlas_config), *times, *pool, *hedged)
    assert status == 0
    assert "3 workers: workers are full 100% of the time: more of them make it faster" in text
    assert "12 workers: both sides wait, for max_staleness = 2" in text


async def test_the_times_of_a_run_may_be_overridden(cusearch, recorded_run, atlas_config):
    source = ("--from", str(recorded_run.folder))
    status, text = cusearch("simulate", str(atlas_config), *source, *SMALL, "--publish-s", "7")
    assert status == 0
    assert "an episode 6.5, 99 % below" in text
    assert "an update 6.0, publishing 7.0, loading 1.5" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "simulate needs times: --from RUN_FOLDER of a run with records, or --episode-s and --update-s"),
        (["--episode-s", "6,15"], "simulate needs times"),
        (["--from", "nowhere"], "nowhere"),
        (
            [*TIMES, "--run.colocate", "true", "--learner.reference", "cpu"],
            "run.colocate: only a learner and workers that work at the same time",
        ),
    ],
)
def test_a_mistake_is_said_in_one_line(cusearch, atlas_config, arguments, said):
    status, text = cusearch("simulate", str(atlas_config), *arguments)
    assert said in status
    assert text == ""
