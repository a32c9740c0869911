"""What `launch`, `demo`, and `runs plot` show, without a run."""

from __future__ import annotations

import asyncio
import io
import json
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from rich.console import Console

from cusearch_async.atlas.questions import WORLDS
from cusearch_async.atlas.questions import test_chains as held_out_chains
from cusearch_async.cli import demo, launch, main, runs
from cusearch_async.cli.parts import live
from cusearch_async.cli.parts.fleet import Child
from cusearch_async.cli.parts.opening import read_ledger
from cusearch_async.config import load_config
from cusearch_async.errors import ConfigError, ProcessDied, RunInUse
from cusearch_async.run.history import record_start
from cusearch_async.run.identity import Identity
from cusearch_async.training.checkpoint import Checkpoints, checkpoints_of, state_at
from cusearch_async.transport.buffer import open_buffer
from cusearch_async.transport.interface import Audit, Ledger, MethodState, WorkerStatus
from cusearch_async.transport.server import is_listening
from tests.strategies import make_trajectory

EXTRA = {"reward/trained": 0.5, "depth/mean_trained": 2.0, "learner/idle_share": 0.1, "rollout/idle_share": 0.2}


def row(step: int, depths: int = 6, **changes) -> dict:
    figures = {"reward/all": 0.5, "reward/em": 0.25, "depth/mean": 2.0, "selection/phase": 12.0}
    figures |= {"staleness/min": 0, "staleness/mean": 1.5, "staleness/max": 12, "time/wait_s": 104.2}
    figures |= {"time/update_s": 101.25, "depth/generated": list(range(1, depths + 1))}
    return {"step": step, "epoch": 1, **figures, "depth/selected": [0] * (depths - 1) + [96], **changes}


def shown_on_80_columns(renderable) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    console.print(renderable)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("depths", [2, 6, 8])
def test_the_table_of_steps_fits_80_columns_and_names_the_depths(depths):
    lines = shown_on_80_columns(live.progress_table([row(step, depths) for step in range(990, 1010)]))
    assert len(lines) == 2 + 12
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    axis = "01234567"[:depths]
    assert lines[1].count(axis) == 2
    assert lines[-1].index("█") == lines[1].index(axis) + depths - 1, "a bar stands under the number of its depth"
    assert lines[-1].split()[0] == "1009"


def test_the_comparison_fits_80_columns_and_counts_links_in_english():
    categories = list(dict.fromkeys(chain.question().category for chain in held_out_chains(1, WORLDS["atlas"])))
    assert categories == ["1 link", "2 links", "3 links", "4 links", "5 links"]
    scores = {name: {"count": 1000.0, "reward": 0.5, "em": 0.5, "depth": 2.0} for name in [*categories, "all"]}
    lines = shown_on_80_columns(demo.comparison({"before": scores, "after": scores}))
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)


async def test_a_demo_starts_a_separate_redis_where_one_is_in_use(atlas_config, redis_url, monkeypatch):
    monkeypatch.setattr("cusearch_async.transport.interface.ALIVE_S", 600.0)  # alive, however slow this machine
    config = load_config(atlas_config, ["--redis.url", redis_url, "--run.name", "demo-second"])
    own = await asyncio.to_thread(demo.with_own_redis, config)
    assert own.redis.url != redis_url
    assert not is_listening(own.redis.url)
    assert demo.with_own_redis(own) == own, "a free address is used as it is"
    async with open_buffer(config) as buffer:
        await buffer.recover(0)
        await buffer.heartbeat("w1", [], WorkerStatus(version=0))
        with pytest.raises(RunInUse, match="run 'demo-second' is alive: w1"):
            await asyncio.to_thread(demo.with_own_redis, config)


@pytest.mark.system  # a second for matplotlib
def test_plot_draws_each_run_and_names_one_without_steps(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        rows = [json.dumps(row(step, **EXTRA)) for step in range(3)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    monkeypatch.setattr("sys.argv", ["cusearch", "runs", "plot", str(tmp_path / "a"), str(tmp_path / "b")])
    main.main()
    assert all((tmp_path / name / "plot.png").read_bytes().startswith(b"\x89PNG") for name in ("a", "b"))
    with pytest.raises(ConfigError, match=r"c/metrics\.jsonl holds no step yet"):
        runs.plot(Namespace(folders=[tmp_path / "c"]), [])


EMPTY = {"step": 0, "epoch": 1}
NO_EPISODE = {"depth/generated": [0] * 6}


@pytest.mark.system  # a second for matplotlib
@pytest.mark.parametrize(
    "rows",
    [
        [row(0, **NO_EPISODE), row(1)],
        [row(0, **NO_EPISODE, **{"depth/selected": [0] * 6})],
        [EMPTY, {"step": 1, "epoch": 1}],
        [EMPTY, row(1)],
        [row(0, 3), row(1, 6)],
        *(
            [EMPTY | odd, row(1, **EXTRA), row(2, **EXTRA) | odd]
            for odd in (
                {"reward/em": None},
                {"depth/generated": []},
                {"depth/generated": [3]},
                {"selection/phase": float("inf")},
                {"staleness/max": float("nan")},
                {"reward/em": "high", "staleness/mean": {}, "depth/mean": [1.0]},
            )
        ),
    ],
)
def test_steps_without_an_episode_or_with_odd_figures_are_drawn_without_a_warning(rows, tmp_path, recwarn):
    """As in a run whose episodes all fail."""
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    runs.plot(Namespace(folders=[tmp_path]), [])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert [str(warning.message) for warning in recwarn if warning.category is RuntimeWarning] == []


@pytest.mark.system
async def test_the_end_of_a_run_tells_what_counting_the_keys_has_found(atlas_config, redis_url, tmp_path):
    overrides = ["--redis.url", redis_url, "--run.name", "live-end", "--run.folder", str(tmp_path)]
    config = load_config(atlas_config, overrides)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row(0, **EXTRA)) + "\n")
    async with open_buffer(config) as buffer:
        await buffer.recover(0)
        await buffer.announce(0, "v0")
        await buffer.admit("w", 0, config.pool.rollouts)
        await buffer.put(make_trajectory(0, 0))
        for gone, verdict in ((False, "the ledger closes"), (True, "the ledger DOES NOT CLOSE")):
            if gone:
                await buffer.connection.client.delete(buffer.keys.payload("0:0"))
            console = Console(file=io.StringIO(), width=200)
            ledger, counted = await read_ledger(config)
            summary = live.conclude(config, ledger, counted, 1.0, console)
            assert ledger.closes, "the counters do not know"
            assert summary["ledger"]["closes"] is not gone
            assert verdict in console.file.getvalue()
            assert ("missing, and not counted as lost: 1 (0:0)" in console.file.getvalue()) is gone


async def test_a_launch_leaves_another_run_of_the_same_name_alone(atlas_config, redis_url, tmp_path):
    """Also when it is told to take over, and before it makes a folder or starts a worker."""
    overrides = ["--redis.url", redis_url, "--run.name", "live-twice", "--run.folder", str(tmp_path / "ours")]
    config = load_config(atlas_config, overrides)
    theirs = Identity(run_id="theirs", host="there", folder="/runs/twice")
    async with open_buffer(config, identity=theirs) as buffer:
        await buffer.recover(0)
    for take_over in (False, True):
        arguments = Namespace(config=atlas_config, accept_changes=True, take_over=take_over)
        with pytest.raises(
            ConfigError,
            match=r"run 'live-twice': run\.folder is .*/ours on .* here and /runs/twice on there in the run; ",
        ):
            await asyncio.to_thread(launch.run, arguments, overrides)
    assert not (tmp_path / "ours").exists()


@pytest.fixture
def complete(atlas_config, tmp_path):
    """A run that has done its steps; nothing can be started, as nothing may listen at a port like this."""
    overrides = ["--run.folder", str(tmp_path / "run"), "--steps", "8", "--redis.url", "redis://127.0.0.1:1/0"]
    config = load_config(atlas_config, overrides)
    checkpoints = Checkpoints(config.folder, 2)
    checkpoints.begin(3, 0)
    for step in (6, 8):
        folder = checkpoints.begin_write(step)
        with checkpoints.write(state_at(step, MethodState(), config)):
            (folder / "model").mkdir(parents=True)
            (folder / "model" / "model.safetensors").write_bytes(b"weights")
        checkpoints.finish(step)
    return atlas_config, overrides


def test_launching_a_complete_run_says_so_at_once(complete, capsys):
    config, overrides = complete
    launch.run(Namespace(config=config, accept_changes=False, take_over=False), overrides)
    said = capsys.readouterr().out
    assert "run atlas is complete: 8 steps are done and run.steps is 8" in " ".join(said.split())
    assert "checkpoints/step000008-e3/model" in said
    assert "cusearch eval" in said


HERE = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("searches", "url", "listens", "asks"),
    [
        (True, HERE, False, "(it needs the retriever: cusearch worker retriever "),
        (True, HERE, True, ""),
        (True, "http://node3:8000", False, "(it needs the retriever at http://node3:8000)"),
        (False, HERE, False, ""),
    ],
)
def test_a_retriever_is_asked_for_where_the_run_has_one(complete, searches, url, listens, asks, monkeypatch):
    monkeypatch.setattr(live, "is_listening", lambda _: listens)
    path, overrides = complete
    agent = {"name": "agent", "agent": "mine:answer", "searches": str(searches).lower()}
    own = [word for key, value in agent.items() for word in (f"--environment.search.{key}", value)]
    own += ["--retriever.url", url]
    config, console = load_config(path, [*overrides, *own]), Console(file=io.StringIO())
    live.print_results(config, live.whole_checkpoint(config), console)
    said = console.file.getvalue()
    assert "cusearch eval" in said
    assert asks in " ".join(said.split())
    assert ("it needs the retriever" in said) == bool(asks)


def test_commands_of_a_folder_with_a_blank_can_be_pasted(complete, tmp_path):
    path, overrides = complete
    (tmp_path / "run").rename(tmp_path / "my run")
    config = load_config(path, [*overrides, "--run.folder", str(tmp_path / "my run")])
    console = Console(file=io.StringIO())
    live.print_results(config, live.whole_checkpoint(config), console)
    (line,) = (line for line in console.file.getvalue().splitlines() if line.startswith("next"))
    assert shlex.split(line)[1:4] == ["cusearch", "eval", str(tmp_path / "my run" / "config.toml")]


def test_a_complete_run_of_another_name_is_not_ours(complete, tmp_path):
    config, overrides = complete
    (tmp_path / "run" / "run.json").write_text('{"run": "other", "id": "1", "created": "2026-01-01"}')
    with pytest.raises(ConfigError, match="belongs to run 'other', not to 'atlas'"):
        launch.run(Namespace(config=config, accept_changes=False, take_over=False), overrides)


def test_a_model_that_is_damaged_is_not_announced(complete, monkeypatch, caplog):
    """The run continues from the checkpoint before it, and makes the steps again."""
    path, overrides = complete
    config = load_config(path, overrides)
    damaged = config.folder / "checkpoints" / "step000008-e3"
    (damaged / "model" / "model.safetensors").write_bytes(b"weighty")
    assert live.whole_checkpoint(config).state.step == 6
    assert f"checkpoint {damaged} is damaged (model/model.safetensors); it is skipped" in caplog.messages

    def continues(folder):
        raise ConfigError("it continues")

    monkeypatch.setattr(launch.run_folder, "refuse_if_held", continues)
    with pytest.raises(ConfigError, match="it continues"):
        launch.run(Namespace(config=path, accept_changes=False, take_over=False), overrides)
    (config.folder / "checkpoints" / "step000006-e3" / "model" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"all checkpoints in .* are damaged"):
        live.whole_checkpoint(config)


def test_a_run_with_steps_left_or_a_version_to_score_is_not_complete(complete, tmp_path):
    path, overrides = complete
    assert not launch.is_complete(8, load_config(path, [*overrides, "--steps", "9"]))
    evaluated = load_config(path, [*overrides, "--eval.every", "2"])
    assert not launch.is_complete(8, evaluated)
    (tmp_path / "run" / "eval.jsonl").write_text('{"step": 8, "epoch": 3}\n')
    assert launch.is_complete(8, evaluated)


def test_a_checkpoint_of_a_course_that_was_left_does_not_count(complete, tmp_path):
    path, overrides = complete
    config = load_config(path, overrides)
    record_start(config, epoch=4, step=6)
    assert checkpoints_of(config).latest().state.step == 6, "the learner of epoch 4 went back to step 6"


class Ended:
    """The processes of a run whose learner has ended with status 0, and whose evaluator waits for the last version."""

    children: ClassVar[dict[str, Child]] = {}

    def has_ended(self, name: str) -> bool:
        return name == "learner"

    def is_run_over(self) -> bool:
        return False

    def wait(self, is_done: Callable[[], bool], poll_s: float) -> None:
        assert any(is_done() for _ in range(3)), "it would be waited for without end"


@pytest.mark.parametrize(("done", "steps"), [(8, 9), (0, 8)])
def test_a_learner_that_was_stopped_alone_ends_the_launch(complete, tmp_path, done, steps):
    path, overrides = complete
    folder = ["--run.folder", str(tmp_path / "fresh")] if done == 0 else []
    config = load_config(path, [*overrides, *folder, "--steps", str(steps)])
    with pytest.raises(
        ProcessDied, match=f"the learner stopped at step {done} of {steps}; start launch again to continue"
    ):
        live.watch(Ended(), config, Console(file=io.StringIO()))


def test_a_learner_that_has_done_its_steps_is_waited_with_for_the_evaluator(complete):
    path, overrides = complete
    with pytest.raises(AssertionError, match="waited for without end"):
        live.watch(Ended(), load_config(path, overrides), Console(file=io.StringIO()))


def test_a_run_without_steps_is_concluded_without_a_picture(atlas_config, tmp_path):
    config = load_config(atlas_config, ["--run.folder", str(tmp_path)])
    console = Console(file=io.StringIO(), width=80)
    assert live.conclude(config, Ledger(), Audit(kept=0, findings=()), 3.2, console)["steps"] == 0
    assert console.file.getvalue() == "no step was done in 3 s, start-up included\n"
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_concluded_without_a_plot_where_nothing_can_draw(atlas_config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    config = load_config(atlas_config, ["--run.folder", str(tmp_path)])
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row(0, **EXTRA)) + "\n")
    console = Console(file=io.StringIO(), width=80)
    assert live.conclude(config, Ledger(), Audit(kept=0, findings=()), 3.2, console)["steps"] == 1
    live.print_results(config, None, console)
    said = "plot.png was not drawn: matplotlib is not installed: pip install 'cusearch-async[study]'\n"
    assert console.file.getvalue().startswith(said)
    assert str(tmp_path / "plot.png") not in console.file.getvalue()


@pytest.mark.parametrize(
    ("step_s", "steps", "said"),
    [
        ([90.0, 2.0, 2.0], 23, "2.0 s a step, about 40 s left"),
        ([60.0] * 4, 14, "60.0 s a step, about 10 min left"),
        ([300.0] * 3, 203, "300.0 s a step, about 16.7 h left"),
        ([1.0] * 8, 8, "1.0 s a step"),
        ([127.0], 8, ""),
        ([100.0] * 20 + [1.0] * 10, 60, "1.0 s a step, about 30 s left"),
    ],
)
def test_what_is_left_of_a_run_is_told_by_its_last_steps(step_s, steps, said):
    rows = [{"step": step, "epoch": 2, "time/step_s": seconds} for step, seconds in enumerate(step_s)]
    assert live.pace(rows, steps) == said
    assert live.pace([], steps) == "", "the first step waits for engines that start"
    earlier = [{"step": step, "epoch": 1, "time/step_s": 1e6} for step in range(2)]
    later = [row | {"step": row["step"] + 2} for row in rows]
    assert live.pace([*earlier, *later], steps + 2) == said, "an earlier start, on another machine, does not count"
    assert live.pace(later, steps + 2) == said, "of a fork from step 2"


class Counted(Ended):
    """Polls the screen as the fleet does, and does what it is told between two polls."""

    def __init__(self, *between: Callable[[], object]) -> None:
        self._between = between

    def wait(self, is_done: Callable[[], bool], poll_s: float) -> None:
        for act in self._between:
            is_done()
            act()
        is_done()


def test_a_wait_is_timed_from_its_own_beginning(monkeypatch, caplog):
    """And not from the beginning of the launch, or of the run."""
    caplog.set_level("INFO")
    clock = [0.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    waited_for = ["step 0"]

    def later(seconds: float, step: str | None = None) -> Callable[[], None]:
        def act() -> None:
            clock[0] += seconds
            waited_for[0] = step or waited_for[0]

        return act

    fleet = Counted(later(10), later(60, "step 1"), later(7), later(0))
    live.Screen(fleet, Console(file=io.StringIO())).wait(
        lambda: f"waiting for {waited_for[0]}", lambda: True, list, lambda: "2.0 s a step"
    )
    said = [message for message in caplog.messages if message.startswith("waiting")]
    assert said == ["waiting for step 0: 10 s; 2.0 s a step", "waiting for step 1: 7 s; 2.0 s a step"]


class Talking:
    """A child that logs one line at every look."""

    def new_lines(self) -> list[str]:
        return ["finished some episodes"]


def test_a_wait_in_which_a_process_tells_news_needs_no_lines_of_its_own(monkeypatch, caplog):
    caplog.set_level("INFO")
    clock = [0.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])

    def later(seconds: float) -> Callable[[], None]:
        return lambda: clock.__setitem__(0, clock[0] + seconds)

    children = {"eval_after": Talking()}
    fleet = Counted(*map(later, [8.0] * 5), children.clear, *map(later, [8.0] * 3))
    fleet.children = children
    live.Screen(fleet, Console(file=io.StringIO())).wait(lambda: "scoring", lambda: True, list)
    assert [message for message in caplog.messages if message.startswith("scoring")] == ["scoring: 64 s"]


def test_the_screen_of_a_launch_says_how_much_is_left_by_the_steps_of_this_start(atlas_config, tmp_path):
    config = load_config(atlas_config, ["--run.folder", str(tmp_path), "--steps", "60"])

    def write(step: int, epoch: int) -> None:
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row(step, epoch=epoch, **{"time/step_s": 30.0 / epoch})) + "\n")

    write(0, 1)
    for epoch, said in ((1, False), (2, True)):
        console = Console(file=io.StringIO(), width=80, force_terminal=True)
        fleet = Counted(lambda: [write(step, epoch) for step in (1, 2)])  # noqa: B023
        fleet.has_ended = lambda name: False
        live.watch(fleet, config, console)
        shown = console.file.getvalue()
        assert ("15.0 s a step, about 14 min left" in shown) is said, shown
        assert "3/60" in shown


@pytest.mark.system
def test_the_end_of_a_continued_run_counts_the_steps_of_this_start_apart(atlas_config, tmp_path):
    config = load_config(atlas_config, ["--run.folder", str(tmp_path)])
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row(step, **EXTRA)) + "\n" for step in range(5)))
    for epoch, step, said in ((1, 0, "5 steps in 3 s, start-up"), (2, 3, "5 steps, 2 of them in 3 s, start-up")):
        record_start(config, epoch=epoch, step=step)
        console = Console(file=io.StringIO(), width=200)
        live.conclude(config, Ledger(), Audit(kept=0, findings=()), 3.2, console)
        assert said in console.file.getvalue()


def test_a_model_is_scored_on_the_gpu_of_a_worker(tmp_path):
    """On the first of the machine it met another run's engine."""
    config, started = load_config(Path("atlas"), ["--run.folder", str(tmp_path)]), {}
    (tmp_path / "eval_after.json").write_text("{}")
    fleet = SimpleNamespace(
        start_command=lambda name, *_, **given: started.update({name: given}),
        gpus_of_worker=lambda: {"CUDA_VISIBLE_DEVICES": "2"},
        stop=lambda name: None,
    )
    demo.evaluate(fleet, SimpleNamespace(wait=lambda *_: None), config, "a/model", "after")
    assert started["eval_after"]["env"] == {"CUDA_VISIBLE_DEVICES": "2"}
