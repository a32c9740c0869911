"""What a step says of itself, by numbers worked by hand."""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
import time
import tracemalloc

import numpy as np
import pytest
from msgspec.structs import replace

from cusearch_async.algorithm.advantages import Advantages
from cusearch_async.algorithm.methods.base import METRICS_OF_ALL
from cusearch_async.errors import WriteFailed
from cusearch_async.files import append_row
from cusearch_async.metrics import files
from cusearch_async.metrics.files import MetricsFile, ScoresFile, read_metrics
from cusearch_async.metrics.log import MetricsLog
from cusearch_async.metrics.step import WorkerRates, describe_environments, describe_step
from cusearch_async.transport.interface import WorkerStatus
from cusearch_async.types import Pool
from tests.strategies import make_trajectory


def test_a_step_is_described_by_its_pool_and_its_selection():
    versions = [np.full(4, version, np.int32) for version in (3, 5, 4, 5)]
    versions[0][2:] = 5  # its oldest token counts
    pool = Pool(
        5,
        tuple(
            make_trajectory(i // 2, i % 2, depth=min(i, 2), retrieval_tokens=10 * i, reward=i / 4, versions=versions[i])
            for i in range(4)
        ),
    )
    selected = [pool.trajectories[3], pool.trajectories[1]]
    found = describe_step(pool, selected, Advantages(np.zeros(2), 2, 0), budget=4, s_max=2)
    assert found["depth/generated"] == [1, 1, 2]
    assert found["depth/selected"] == [0, 1, 1]
    assert found["reward/all"] == pytest.approx(0.375)
    assert found["reward/trained"] == pytest.approx(0.5)
    assert (found["staleness/min"], found["staleness/mean"], found["staleness/max"]) == (0, 0.75, 2)
    assert found["by_depth/staleness"] == [2, 0, 0.5]
    assert found["selection/budget_filled"] == 0.5
    assert found["selection/coverage"] == 40
    assert found["selection/coverage_of_best"] == pytest.approx(40 / 50)


def test_recall_is_a_mean_over_the_episodes_whose_evidence_is_known():
    pool = Pool(0, tuple(make_trajectory(i, recall=recall) for i, recall in enumerate((0.5, None, 1.0))))
    nothing = Advantages(np.zeros(0), 0, 0)
    assert describe_step(pool, [], nothing, budget=1, s_max=2)["episode/recall"] == 0.75
    unknown = Pool(0, (make_trajectory(),))
    assert "episode/recall" not in describe_step(unknown, [], nothing, budget=1, s_max=2)


def test_recall_of_those_that_searched_says_nothing_of_a_policy_that_does_not():
    nothing = Advantages(np.zeros(0), 0, 0)
    idle, found = make_trajectory(0, recall=0.0, depth=0), make_trajectory(1, recall=0.5, depth=1)

    def of(*trajectories):
        return describe_step(Pool(0, trajectories), [], nothing, budget=1, s_max=2)

    assert of(idle, found)["episode/recall_of_searched"] == 0.5
    assert "episode/recall_of_searched" not in of(idle)


def test_what_the_environment_answers_again_is_counted_within_an_episode():
    """Of four: 7 8 twice in one episode, and once in another; the policy's own 7 8 are none."""
    rows = [[[1], [7, 8], [7, 8], [4], [7, 8], [9]], [[1, 1], [2], [7, 8], [3], [7], [5]], [[1], [7, 8]]]
    pool = []
    for ticket, parts in enumerate(rows):
        sampled = np.concatenate([np.full(len(part), place % 2 == 1) for place, part in enumerate(parts)])
        tokens, count = np.concatenate(parts).astype(np.int32), int(sampled.sum())
        numbers = {"logprobs": np.zeros(count, np.float32), "versions": np.zeros(count, np.int32)}
        pool.append(dataclasses.replace(make_trajectory(ticket), token_ids=tokens, sampled=sampled, **numbers))
    nothing = Advantages(np.zeros(0), 0, 0)
    found = describe_step(Pool(0, tuple(pool)), [], nothing, budget=1, s_max=2)
    assert found["episode/repeated_observations"] == 1 / 4
    assert describe_step(Pool(0, ()), [], nothing, budget=1, s_max=2)["episode/repeated_observations"] == 0


def test_what_of_the_gradients_weight_lies_on_trajectories_that_are_alone():
    """Of |A|·tokens: 1 x 4 and 1 x 8 in the group of two, 0.5 x 24 alone. The rest of the pool does not count."""
    of_pool = ((1, 0, 4), (1, 1, 8), (3, 0, 24), (3, 1, 8))
    pool = Pool(0, tuple(make_trajectory(ticket, rollout, sampled=n) for ticket, rollout, n in of_pool))
    selected = pool.trajectories[:3]
    of_three = np.array([1.0, -1.0, 0.5])
    found = describe_step(pool, selected, Advantages(of_three, 1, 0), budget=3, s_max=2)
    assert found["selection/singleton_mass"] == 12 / 24
    assert found["selection/usable_share"] == pytest.approx(2 / 3)
    silent = describe_step(pool, selected, Advantages(0 * of_three, 1, 2), budget=3, s_max=2)
    assert (silent["selection/singleton_mass"], silent["selection/usable_share"]) == (0.0, 0.0)


def test_a_depth_that_the_pool_does_not_have_has_no_staleness():
    pool = Pool(3, (make_trajectory(0, depth=2, versions=np.full(4, 1, np.int32)),))
    found = describe_step(pool, pool.trajectories, Advantages(np.zeros(1), 1, 0), budget=1, s_max=3)
    assert found["by_depth/staleness"] == [None, None, 2, None]


def test_environments_are_described_one_by_one_where_there_are_several():
    labels = ["a", "b", "a", "a"]
    pool = Pool(
        0,
        tuple(make_trajectory(i, environment=label, reward=i / 4, em=float(i == 1)) for i, label in enumerate(labels)),
    )
    found = describe_environments(pool, pool.trajectories[1:3], ["a", "b", "c"])
    assert (found["environment/a/share"], found["environment/b/share"]) == (0.75, 0.25)
    assert found["environment/a/reward"] == pytest.approx((0 + 2 + 3) / 12)
    assert (found["environment/a/em"], found["environment/b/em"]) == (0, 1)
    assert (found["environment/a/trained_share"], found["environment/b/trained_share"]) == (pytest.approx(1 / 3), 1)
    assert found["environment/c/share"] == 0, "none of its trajectories is in this pool"
    assert describe_environments(pool, [], ["a"]) == {}


def test_what_right_answers_earn_more_is_told_where_there_are_right_and_wrong_ones():
    right, wrong = make_trajectory(0, em=1.0, reward=0.75), make_trajectory(1, em=0.0, reward=0.5)
    nothing = Advantages(np.zeros(0), 1, 0)

    def of(*trajectories):
        return describe_step(Pool(0, trajectories), [], nothing, budget=1, s_max=2)

    assert of(right, wrong)["reward/right_minus_wrong"] == 0.25
    assert "reward/right_minus_wrong" not in of(right).keys() | of(wrong).keys()
    without_gold = make_trajectory(2, em=0.0, answers=(), reward=2.0)
    assert of(right, wrong, without_gold)["reward/right_minus_wrong"] == 0.25, "it cannot be right"
    by_reward = make_trajectory(3, em=1.0, prediction=None, reward=5.0)
    assert of(right, wrong, by_reward)["reward/right_minus_wrong"] == 0.25, "it is right because its reward is 1"
    selections = {name.removeprefix("selection/") for name in of(right) if name.startswith("selection/")}
    assert selections == METRICS_OF_ALL, "which no method's own may be called"


def test_the_slowest_worker_is_measured_against_the_median_while_it_works():
    rates = WorkerRates()
    workers = {
        name: WorkerStatus(sampled_tokens=tokens, request_s=request_s, busy_s=9, alive_s=10)
        for name, tokens, request_s in (("a", 1000, 50), ("few at once", 40, 2), ("slow", 80, 80), ("idle", 0, 0))
    }
    assert rates.since_last(workers)["rollout/slowest_share"] == pytest.approx(1 / 20)
    faster = {name: workers[name] for name in ("a", "few at once")}
    assert WorkerRates().since_last(faster)["rollout/slowest_share"] == 1, "which has few episodes is not slow"
    assert "rollout/slowest_share" not in rates.since_last({}), "nor of one alone"


def test_a_slow_worker_that_ends_no_request_in_a_step_stays_the_slowest():
    """Twenty times slower than the other, it ended one in every second step, and no alarm saw three in a row."""
    rates = WorkerRates()
    fast, slow = (
        WorkerStatus(sampled_tokens=1000, request_s=50, alive_s=10, in_flight=4),
        WorkerStatus(sampled_tokens=80, request_s=80, alive_s=10, in_flight=4),
    )
    first = rates.since_last({"a": fast, "b": slow})["rollout/slowest_share"]
    fast = replace(fast, sampled_tokens=2000, request_s=100, alive_s=20)
    assert rates.since_last({"a": fast, "b": slow})["rollout/slowest_share"] == first, "it has not even reported"
    fast, dead = replace(fast, sampled_tokens=2500, request_s=125, alive_s=25), replace(slow, heartbeat_age_s=1200.0)
    assert "rollout/slowest_share" not in rates.since_last({"a": fast, "b": dead}), "it was replaced"
    fast, idle = replace(fast, sampled_tokens=3000, request_s=150, alive_s=30), replace(slow, alive_s=30, in_flight=0)
    assert "rollout/slowest_share" not in rates.since_last({"a": fast, "b": idle})


def test_worker_totals_become_rates_of_the_step():
    rates = WorkerRates()
    total = WorkerStatus(sampled_tokens=1000, busy_s=8, alive_s=10, weight_load_s=1)
    first = rates.since_last({"w": total})
    assert first["rollout/tokens_per_s"] == 100
    assert first["rollout/idle_share"] == pytest.approx(0.2)
    later = WorkerStatus(sampled_tokens=1600, busy_s=9, alive_s=14, weight_load_s=1)
    second = rates.since_last({"w": later})
    assert second["rollout/tokens_per_s"] == 150
    assert second["rollout/idle_share"] == pytest.approx(0.75)
    assert second["rollout/weight_load_s"] == 0
    over = rates.since_last({"w": replace(later, alive_s=24)}, had_questions=False)
    assert not over.keys() & {"rollout/tokens_per_s", "rollout/idle_share"}, "of 0 and 1 no mean could be made"
    assert over["rollout/workers"] == 1


def test_a_worker_counts_from_when_it_was_ready():
    """Before, the 60 s of loading that it had reported were taken off: no search of the first step counted."""
    rates = WorkerRates()
    rates.since_last({"w": WorkerStatus(starting="loading vLLM", alive_s=60)})
    ready = WorkerStatus(alive_s=40, busy_s=30, sampled_tokens=8000, searches=500, search_failures=400)
    found = rates.since_last({"w": ready})
    assert (found["rollout/searches"], found["rollout/search_failures"]) == (500, 400)
    assert found["rollout/tokens_per_s"] == 200
    assert found["rollout/idle_share"] == pytest.approx(0.25)


def test_a_worker_and_the_one_in_its_place_were_not_there_together():
    """Their rates were added: 300 tokens a second for 17,000 tokens in 100 s."""
    rates = WorkerRates()
    steady = WorkerStatus(alive_s=900, busy_s=900, sampled_tokens=90_000)
    rates.since_last({"a": steady, "b": steady})
    a, b = (replace(steady, alive_s=900 + s, sampled_tokens=90_000 + 100 * s) for s in (100, 50))
    found = rates.since_last({"a": a, "b": b, "c": WorkerStatus(alive_s=20, busy_s=20, sampled_tokens=2_000)})
    assert found["rollout/tokens_per_s"] == pytest.approx(170)


def test_versions_that_were_scored_on_the_same_questions_share_their_ids(tmp_path):
    """Thousands of texts a version were kept for as long as the page was served."""
    for step, ids in enumerate((["a", "b"], ["a", "b"], ["a"])):
        append_row(
            tmp_path / "eval.jsonl", {"step": step, "epoch": 1, "each": {"question_id": ids, "em": [1] * len(ids)}}
        )
    first, second, third = (row["each"]["question_id"] for row in ScoresFile(tmp_path / "eval.jsonl").read([(1, 0)]))
    assert first is second == ["a", "b"]
    assert third == ["a"]


def test_where_no_engine_is_ready_none_is_busy():
    """Of a run that continued with pools that it had, the engines were never idle."""
    found = WorkerRates().since_last({"w": WorkerStatus(starting="loading vLLM", alive_s=60)})
    assert "rollout/idle_share" not in found
    assert found["rollout/tokens_per_s"] == 0


def test_a_step_shorter_than_a_heartbeat_has_its_workers_and_no_speed():
    rates = WorkerRates()
    status = WorkerStatus(sampled_tokens=1000, busy_s=8, alive_s=10)
    rates.since_last({"w": status})
    found = rates.since_last({"w": replace(status, heartbeat_age_s=0.7)})
    assert found["rollout/workers"] == 1
    assert "rollout/tokens_per_s" not in found, "0 would pull means down"
    gone = rates.since_last({"w": replace(status, heartbeat_age_s=60.0)})
    assert gone["rollout/workers"] == 0
    assert rates.since_last({})["rollout/tokens_per_s"] == 0


def test_failed_searches_are_counted_by_the_step_and_the_slowest_worker_is_told():
    rates = WorkerRates()
    first = WorkerStatus(alive_s=10, searches=100, search_failures=3, search_p99_s=0.5)
    rates.since_last({"a": first, "b": first})
    later = replace(first, alive_s=20, searches=160, search_failures=10)
    found = rates.since_last({"a": later, "b": replace(later, search_p99_s=2.5)})
    assert (found["rollout/searches"], found["rollout/search_failures"]) == (120, 14)
    assert found["rollout/search_p99_s"] == 2.5
    alone = rates.since_last({"a": replace(later, alive_s=30), "b": replace(later, search_p99_s=2.5)})
    assert alone["rollout/search_p99_s"] == 0.5, "of a worker that has died nothing is told"


ROW = {
    "reward/all": 0.5,
    "reward/em": 0.5,
    "depth/mean": 1.0,
    "staleness/mean": 0.0,
    "depth/generated": [1, 2],
    "by_depth/ess": [None, 0.5],
}


def test_a_row_tells_its_epoch_and_when_it_was_written(tmp_path):
    before = time.time()
    first = MetricsLog(tmp_path, epoch=3, from_step=0)
    first.write(0, ROW)
    first.close()
    [row] = read_metrics(tmp_path / "metrics.jsonl")
    assert (row["step"], row["epoch"], row["depth/generated"]) == (0, 3, [1, 2])
    assert before - 1 < row["time"] <= time.time()


def test_a_disk_that_is_full_for_the_curves_is_named(tmp_path, monkeypatch):
    """TensorBoard opens its file for every write, in a thread, whose traceback nobody needs to see."""
    said = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    before = threading.excepthook
    metrics = MetricsLog(tmp_path, epoch=1, from_step=0)
    metrics.write(0, ROW)
    [events] = (tmp_path / "tensorboard").iterdir()
    (tmp_path / "full").symlink_to("/dev/full")
    (tmp_path / "full").replace(events)

    def write_on():
        for step in range(1, 100_000):
            metrics.write(step, ROW)

    with pytest.raises(WriteFailed, match=r"cannot write .*/tensorboard: No space left on device"):
        write_on()
    with pytest.raises(WriteFailed):
        metrics.close()
    assert said == []
    assert threading.excepthook is before


def test_another_thread_that_fails_is_still_told(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    metrics = MetricsLog(tmp_path, epoch=1, from_step=0)
    failing = threading.Thread(target=lambda: 1 / 0)
    failing.start()
    failing.join()
    metrics.close()
    assert [type(told.exc_value) for told in said] == [ZeroDivisionError]


def test_steps_that_are_run_again_replace_those_of_the_earlier_life(tmp_path):
    first = MetricsLog(tmp_path, epoch=1, from_step=0)
    for step in range(4):
        first.write(step, ROW)
    resumed = MetricsLog(tmp_path, epoch=2, from_step=2)
    resumed.write(2, ROW | {"reward/all": 0.75})
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["epoch"], row["reward/all"]) for row in rows] == [(0, 1, 0.5), (1, 1, 0.5), (2, 2, 0.75)]
    first.write(4, ROW)
    first.write(2, ROW)
    assert read_metrics(tmp_path / "metrics.jsonl") == rows, "a late row of an older epoch counts for nothing"
    first.close()
    resumed.close()


def test_a_long_run_that_was_continued_is_read_in_time_of_its_length(tmp_path):
    compared = itertools.count()

    class Step(int):
        def __lt__(self, other):
            next(compared)
            return int(self) < int(other)

        def __gt__(self, other):
            next(compared)
            return int(self) > int(other)

    rows = [{"step": Step(step), "epoch": epoch} for epoch in (1, 2) for step in range(300 * (epoch - 1), 600)]
    assert [row["epoch"] for row in files._of_latest(rows)] == [1] * 300 + [2] * 300
    assert next(compared) < 20 * len(rows)


def test_a_line_that_is_still_being_written_does_not_count(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_text('{"step": 0, "epoch": 1}\n{"step": 1, "epoch": 1}\n{"step": 2, "rew')
    assert [row["step"] for row in read_metrics(path)] == [0, 1]


def test_a_line_that_is_no_row_is_skipped_and_named_once(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    row = b'{"step": %d, "epoch": 1}\n'
    path.write_bytes(row % 0 + b'{"step": 1, "rew\n' + bytes(20) + b'\n7\n\xff\n{"step": 1}\n' + row % 2)
    for _ in range(2):
        assert [row["step"] for row in read_metrics(path)] == [0, 2]
    assert [record.message.rpartition("metrics.jsonl, ")[2] for record in caplog.records] == [
        f"line {number} is damaged; it is skipped" for number in (2, 3, 4, 5, 6)
    ]


def test_a_long_file_is_not_held_whole_while_it_is_read(tmp_path):
    """A learner that resumed held it three times; and each row had names of its own: 13.8 kB a step."""
    path = tmp_path / "metrics.jsonl"
    row = {"step": 0, "epoch": 1, **{f"a_metric_with_a_long_name/{number}": number / 7 for number in range(100)}}
    path.write_text("".join(json.dumps(row | {"step": step}) + "\n" for step in range(1000)))
    tracemalloc.start()
    rows = read_metrics(path)
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(rows) == 1000
    assert kept < 9_000 * 1000
    assert most < kept + 1_000_000


def test_a_file_that_grows_is_read_as_one_that_is_read_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    growing = MetricsFile(path)
    assert growing.read() == []
    pieces = [
        '{"step": 0, "epoch": 1}\n{"step": 1, "epo',
        'ch": 1}\nrubbish\n',
        '{"step": 2, "epoch": 1}\n',
        '{"step": 1, "epoch": 2, "em": 1}\n',
        "",
    ]
    for piece in pieces:
        with path.open("a") as file:
            file.write(piece)
        assert growing.read() == read_metrics(path)
        assert growing.read() is growing.read(), "nothing is computed again"
    assert [row["epoch"] for row in growing.read()] == [1, 2]
    path.write_text('{"step": 5, "epoch": 1}\n')
    assert growing.read() == read_metrics(path), "it was cut"
    path.rename(tmp_path / "aside")
    path.write_text('{"step": 0, "epoch": 1}\n' * 9)
    assert growing.read() == read_metrics(path), "another file, of which more is there already"
