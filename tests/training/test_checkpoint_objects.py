"""Checkpoints in an object store: a learner on another machine continues from them."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

import obstore
import pytest

from cusearch_async.cli import launch
from cusearch_async.config import Config
from cusearch_async.errors import ConfigError, ObjectsUnavailable, WriteFailed
from cusearch_async.files import append_row
from cusearch_async.metrics.tracking import _id_of
from cusearch_async.objects import Objects
from cusearch_async.run.folder import hold_for_take_over, mark, read_marker
from cusearch_async.run.history import epochs_and_steps, record_start, record_stop
from cusearch_async.training import checkpoint_objects as module
from cusearch_async.training.checkpoint import Checkpoints
from cusearch_async.training.checkpoint_objects import CheckpointObjects, learner_checkpoints
from cusearch_async.transport.interface import RunState
from tests.object_stores import noted_calls, s3, store_url  # noqa: F401  (fixtures)
from tests.training.test_checkpoint import UNKNOWN, names, save, write
from tests.training.test_takeover import Scene, taken_over

OBJECTS = ("--learner.checkpoint_objects", "s3://bucket/run")
STATE = "state.json"


class Host:
    """A machine with a learner of the run."""

    def __init__(self, config: Config) -> None:
        self.config, self.folder = config, config.folder

    def restore(self) -> None:
        asyncio.run(CheckpointObjects.of(self.config).restore())

    def start(self, epoch: int, step: int = 0):
        """Its learner takes over, at `step`; its checkpoints."""
        self.restore()
        checkpoints = learner_checkpoints(self.config)
        checkpoints.begin(epoch, step)
        record_start(self.config, epoch, step)
        checkpoints.tell_start()
        return checkpoints

    def newest(self, known: RunState = UNKNOWN) -> str | None:
        found = learner_checkpoints(self.config).newest(known)
        return found and found.path.name


@pytest.fixture
def objects(store_url, monkeypatch) -> Objects:  # noqa: F811
    """The store at the place that the setting names."""
    monkeypatch.setattr(module, "Objects", lambda url, key: Objects(store_url, key))
    return Objects(store_url, "of the test")


@pytest.fixture
def host(objects, atlas_config, tmp_path):
    return lambda name: Host(Scene(atlas_config, tmp_path / name, *OBJECTS).config)


def checkpoints_in(objects: Objects) -> set[str]:
    return {path.split("/")[1] for path in objects.paths() if path.startswith("checkpoints/")}


def put(objects: Objects, path: str, content: bytes) -> None:
    obstore.put(objects._store, path, content)


@contextmanager
def putting_without(part: str) -> Iterator[None]:
    """An outage that begins with the first object whose path has this part."""
    put = Objects.put

    def refuse(own, path, file):
        if part in path:
            raise WriteFailed("an outage")
        put(own, path, file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Objects, "put", refuse)
        yield


def save_without(part: str, checkpoints, step: int) -> None:
    write(checkpoints, step)
    with putting_without(part), pytest.raises(WriteFailed, match="an outage"):
        checkpoints.finish(step)


def test_another_machine_finds_checkpoints_starts_and_curves(host, objects):
    here, there = host("here"), host("there")
    first = here.start(1)
    for step in (1, 2):
        append_row(here.folder / "metrics.jsonl", {"step": step - 1})
        save(first, step)
    there.restore()
    assert there.newest() == "step000002-e1"
    assert names(there.folder) == names(here.folder) == ["step000001-e1", "step000002-e1"]
    assert (there.folder / "checkpoints/step000002-e1/deepspeed/weights").read_text() == "2"
    assert read_marker(there.folder).id == read_marker(here.folder).id, "the same run, for Redis, too"
    assert epochs_and_steps(there.folder) == [(1, 0)]
    assert (there.folder / "metrics.jsonl").read_bytes() == (here.folder / "metrics.jsonl").read_bytes()


def test_a_run_that_is_continued_elsewhere_is_the_same_one_for_a_tracker(host, objects):
    """There was a second one, with all steps again."""
    here, there = host("here"), host("there")
    first = here.start(1)
    (here.folder / "tracked").mkdir()
    known = _id_of(here.folder)
    (here.folder / "tracked" / "wandb.json").write_text('{"steps": 2}')
    save(first, 2)
    there.restore()
    assert _id_of(there.folder) == known
    assert (there.folder / "tracked" / "wandb.json").read_text() == '{"steps": 2}', "what it has is not sent again"


def test_the_first_machine_continues_where_the_second_ended(host, objects):
    here, there = host("here"), host("there")
    save(here.start(1), 2)
    second = there.start(2, 2)
    append_row(there.folder / "metrics.jsonl", {"step": 2})
    save(second, 4)
    here.restore()
    assert here.newest() == "step000004-e2"
    assert epochs_and_steps(here.folder) == [(1, 0), (2, 2)]
    assert (here.folder / "metrics.jsonl").exists()


def test_curves_that_were_fetched_too_early_are_fetched_again(host, objects):
    """A launch there was refused while the learner here was alive. Before, its short curves replaced the whole ones in
    the store."""
    here, there = host("here"), host("there")
    first = here.start(1)
    for step in (1, 2, 3):
        for name in ("metrics.jsonl", "eval.jsonl"):
            append_row(here.folder / name, {"step": step, "epoch": 1})
        save(first, step)
        if step == 1:
            there.restore()
    whole = (here.folder / "metrics.jsonl").read_bytes()
    there.start(2, 3)
    for name in ("metrics.jsonl", "eval.jsonl"):
        assert (there.folder / name).read_bytes() == whole
        assert CheckpointObjects.of(there.config)._objects.read(name) == whole


def test_what_was_written_here_since_is_kept(host, objects):
    """The store gets the curves with every checkpoint; a killed learner had written on."""
    here = host("here")
    save(here.start(1), 1)
    append_row(here.folder / "metrics.jsonl", {"step": 1, "epoch": 1})
    written = (here.folder / "metrics.jsonl").read_bytes()
    here.start(2, 1)
    assert (here.folder / "metrics.jsonl").read_bytes() == written


def test_what_a_replaced_learner_wrote_later_does_not_count(host, objects):
    here, there, third = host("here"), host("there"), host("third")
    old = here.start(1)
    save(old, 2)
    new = there.start(2, 2)
    save(old, 6)  # it does not know yet
    third.restore()
    assert third.newest() == "step000002-e1", "though the later learner has no checkpoint yet"
    save(new, 4)
    assert checkpoints_in(objects) == {"step000002-e1", "step000004-e2"}


async def test_a_start_is_in_the_store_before_its_first_checkpoint(objects, atlas_config, tmp_path, monkeypatch):
    """Or checkpoints of the learner before count elsewhere until then, and its epoch is given twice. No other learner
    waits for the upload."""
    s, put_there = Scene(atlas_config, tmp_path / "here", *OBJECTS), Objects.put

    def while_others_may_take_over(own, path, file):
        with hold_for_take_over(s.config.folder, 0.0):
            put_there(own, path, file)

    monkeypatch.setattr(Objects, "put", while_others_may_take_over)
    (await taken_over(s))._checkpoints.tell_start()
    assert {"starts/0001.json", "starts/0001.toml"} <= set(objects.paths())


def test_a_store_never_has_a_start_without_the_checkpoint_that_it_resumes(host, objects, atlas_config, tmp_path):
    """As in a fork, or where the store is set later: a learner elsewhere would have begun the run at step 0."""
    here = host("here")
    mark(here.folder, here.config.run.name)
    without = Checkpoints(here.folder, 3)
    without.begin(1, 0)
    save(without, 10)
    record_start(here.config, 1, 0)
    with pytest.raises(WriteFailed, match="an outage"), putting_without("step000010"):
        here.start(2, 10)
    assert objects.paths() == []
    here.start(3, 10)
    assert checkpoints_in(objects) == {"step000010-e1"}


def test_a_checkpoint_counts_elsewhere_only_with_the_curves_up_to_it(host, objects):
    """The rows between were missing for ever, where the machine was lost between the two."""
    here, there = host("here"), host("there")
    first = here.start(1)
    append_row(here.folder / "metrics.jsonl", {"step": 0, "epoch": 1})
    save(first, 1)
    append_row(here.folder / "metrics.jsonl", {"step": 1, "epoch": 1})
    save_without("metrics.jsonl", first, 2)
    there.restore()
    assert there.newest() == "step000001-e1"


def test_a_replaced_learner_leaves_the_curves_of_the_new_one(host, objects):
    here, there = host("here"), host("there")
    first = here.start(1)
    save(first, 1)
    second = there.start(2, 1)
    for step, folder in ((1, there.folder), (1, here.folder)):
        append_row(folder / "metrics.jsonl", {"step": step, "epoch": 2})
    save(second, 2)
    record_stop(here.folder, 1, None, "fenced")
    first.tell_stop()
    assert objects.read("metrics.jsonl") == (there.folder / "metrics.jsonl").read_bytes()
    assert "starts/0001.stop" in objects.paths()


def test_as_many_stay_as_in_the_folder_and_none_of_a_later_learner_goes(host, objects):
    old = host("here").start(1)
    for step in (1, 2, 3):
        save(old, step)
    assert checkpoints_in(objects) == {"step000002-e1", "step000003-e1"}
    save(host("there").start(2, 3), 9)
    save(old, 4)
    assert "step000009-e2" in checkpoints_in(objects)


def test_a_state_comes_last_and_goes_first(host, objects, monkeypatch):
    checkpoints = host("here").start(1)
    done = noted_calls(monkeypatch)
    for step in (1, 2, 3):
        save(checkpoints, step)
    of_first = [(what, path.partition("-e1/")[2]) for what, path in done if "step000001" in path]
    put_first, *_ = [number for number, (what, path) in enumerate(of_first) if path == STATE]
    assert of_first[put_first] == ("put", STATE)
    assert {path for what, path in of_first[:put_first]} == {"deepspeed/weights"}
    assert of_first[put_first + 1] == ("delete", STATE)


def test_old_checkpoints_that_cannot_be_removed_do_not_end_the_learner(host, objects, monkeypatch, caplog):
    def refuses(own, path):
        raise WriteFailed(f"cannot remove {path}: denied")

    monkeypatch.setattr(Objects, "remove", refuses)
    checkpoints = host("here").start(1)
    for step in (1, 2, 3):
        save(checkpoints, step)
    assert len(checkpoints_in(objects)) == 3
    assert "old checkpoints stay in the object store until the next one: cannot remove" in caplog.text


def test_a_checkpoint_that_was_cut_off_is_none_and_the_next_learner_removes_it(host, objects):
    here = host("here")
    checkpoints = here.start(1)
    save(checkpoints, 2)
    save_without("step000004-e1/state.json", checkpoints, 4)
    there = host("there")
    there.restore()
    assert names(there.folder) == [there.newest()] == ["step000002-e1"]
    save(there.start(2, 2), 4)
    assert checkpoints_in(objects) == {"step000002-e1", "step000004-e2"}


def test_a_damaged_checkpoint_is_skipped(host, objects):
    checkpoints = host("here").start(1)
    save(checkpoints, 2)
    save(checkpoints, 4)
    put(objects, "checkpoints/step000004-e1/deepspeed/weights", b"5")
    there = host("there")
    there.restore()
    assert there.newest() == "step000002-e1"


def test_a_restore_that_is_cut_off_leaves_no_half_checkpoint(host, objects, monkeypatch):
    save(host("here").start(1), 2)
    there, pieces = host("there"), Objects.pieces

    async def cut(own, path):
        if path.endswith("weights"):
            raise ObjectsUnavailable("the connection is cut")
        async for piece in pieces(own, path):
            yield piece

    monkeypatch.setattr(Objects, "pieces", cut)
    with pytest.raises(ObjectsUnavailable, match="the connection is cut"):
        there.restore()
    monkeypatch.setattr(Objects, "pieces", pieces)
    assert there.newest() is None
    there.restore()
    assert there.newest() == "step000002-e1"


def test_a_place_with_another_run_is_refused(host, objects, atlas_config, tmp_path):
    save(host("here").start(1), 2)
    other = Host(Scene(atlas_config, tmp_path / "other", "--run.name", "other", *OBJECTS).config)
    with pytest.raises(ConfigError, match=r"learner.checkpoint_objects .* has the checkpoints of another run"):
        other.restore()
    used = host("used")
    mark(used.folder, "atlas")
    record_start(used.config, 1, 0)
    with pytest.raises(ConfigError, match=r"another run \(run.name 'atlas', made .*\) than .*used; choose another"):
        used.restore()
    put(objects, "run.json", b"{")
    with pytest.raises(ConfigError, match=r"run.json cannot be read"):
        host("new").restore()


def test_names_that_point_elsewhere_are_left_alone(host, objects, tmp_path):
    save(host("here").start(1), 2)
    for path in ("checkpoints/x/state.json", "checkpoints/step000009-e1", "starts/deep/0009.json", "launch.toml"):
        put(objects, path, b"{}")
    there = host("there")
    there.restore()
    assert names(there.folder) == ["step000002-e1"]
    assert not (there.folder / "starts" / "deep").exists()
    assert not (there.folder / "launch.toml").exists()


def test_an_empty_place_restores_nothing(host):
    here = host("here")
    here.restore()
    assert here.newest() is None
    assert {path.name for path in here.folder.iterdir()} <= {"run.json", "takeover.lock"}


def test_a_learner_on_another_machine_continues_the_run(host, objects, atlas_config, tmp_path):
    """The whole of a learner but its model: take-over, training, checkpoints."""
    here = Scene(atlas_config, tmp_path / "here", *OBJECTS)
    Host(here.config).restore()
    here.lead()
    there = Scene(atlas_config, tmp_path / "there", *OBJECTS, "--run.steps", "3")
    there.run, there.buffer._run = here.run, here.run
    Host(there.config).restore()
    there.lead()
    assert [event for event in there.events if event.startswith(("load", "update"))] == [
        "load step000002-e1",
        "update 2",
    ]
    assert epochs_and_steps(there.config.folder) == [(1, 0), (2, 2)]
    assert checkpoints_in(objects) == {"step000002-e1", "step000003-e2"}


def test_a_launch_on_another_machine_is_of_the_same_run(host, objects, atlas_config, tmp_path, capsys):
    """It looks at the folder before the learner fills it."""
    save(host("here").start(1), 2)
    there = tmp_path / "there"
    overrides = ["--run.folder", str(there), "--run.steps", "2", "--redis.url", "redis://127.0.0.1:1/0", *OBJECTS]
    launch.run(Namespace(config=atlas_config, accept_changes=False, take_over=False), overrides)
    assert "is complete: 2 steps are done" in " ".join(capsys.readouterr().out.split())
    assert read_marker(there).id == read_marker(tmp_path / "here").id


def test_a_store_that_cannot_be_read_is_named(host, objects, monkeypatch):
    def refuses(own):
        raise ObjectsUnavailable(f"cannot list {own.url}: refused")

    monkeypatch.setattr(Objects, "paths", refuses)
    with pytest.raises(ObjectsUnavailable, match="refused"):
        host("here").restore()


def test_a_restore_that_is_cut_off_before_the_curves_brings_them_the_next_time(host, objects, monkeypatch):
    """Or the next learner here would put its old ones over the complete ones there."""
    here, there = host("here"), host("there")
    save(here.start(1), 1)
    append_row(here.folder / "metrics.jsonl", {"step": 0, "epoch": 1})
    theirs = there.start(2, 1)
    append_row(there.folder / "metrics.jsonl", {"step": 1, "epoch": 2})
    append_row(there.folder / "eval.jsonl", {"step": 1, "epoch": 2})
    save(theirs, 4)
    curves = {name: (there.folder / name).read_bytes() for name in ("metrics.jsonl", "eval.jsonl")}
    restore_file = CheckpointObjects._restore_file

    async def cut_off(self, path):
        if path in curves:
            raise ObjectsUnavailable("an outage")
        await restore_file(self, path)

    monkeypatch.setattr(CheckpointObjects, "_restore_file", cut_off)
    with pytest.raises(ObjectsUnavailable):
        here.restore()
    monkeypatch.setattr(CheckpointObjects, "_restore_file", restore_file)
    here.start(3, 4)
    assert {name: (here.folder / name).read_bytes() for name in curves} == curves
    elsewhere = host("elsewhere")
    elsewhere.restore()
    assert {name: (elsewhere.folder / name).read_bytes() for name in curves} == curves


def test_a_checkpoint_that_could_not_be_put_there_is_put_there_by_the_next_learner(host, objects):
    here = host("here")
    checkpoints = here.start(1)
    save(checkpoints, 2)
    save_without("step000004", checkpoints, 4)
    here.start(2, 4)
    elsewhere = host("elsewhere")
    elsewhere.restore()
    assert elsewhere.newest() == here.newest() == "step000004-e1"


def test_a_checkpoint_that_a_living_learner_removes_meanwhile_is_not_needed(host, objects, monkeypatch):
    checkpoints, elsewhere = host("here").start(1), host("elsewhere")
    for step in (1, 2, 3):
        save(checkpoints, step)
    fetch, saved = CheckpointObjects._fetch, []

    async def slow(self, path, target):
        if not saved:
            saved.append(await asyncio.to_thread(save, checkpoints, 9))
        await fetch(self, path, target)

    monkeypatch.setattr(CheckpointObjects, "_fetch", slow)
    elsewhere.restore()
    assert elsewhere.newest() == "step000003-e1"


def test_a_checkpoint_that_is_damaged_here_is_fetched_again(host, objects, caplog):
    here = host("here")
    save(here.start(1), 2)
    file = here.folder / "checkpoints" / "step000002-e1" / "deepspeed" / "weights"
    whole = file.read_bytes()
    file.write_bytes(b"9")
    here.restore()
    assert file.read_bytes() == whole
    assert here.newest() == "step000002-e1"
