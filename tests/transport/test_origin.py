"""Two runs of one name, each with its own folder, on one Redis: the second takes nothing of the first."""

from __future__ import annotations

import shutil

import pytest

from cusearch_async.errors import ConfigError
from cusearch_async.run import folder as run_folder
from cusearch_async.run.origin import Origin, may_delete, origin_of, refuse_another
from cusearch_async.transport.interface import MethodState
from tests.strategies import make_trajectory

# an id that Lua takes for a number, and a folder with a blank
OURS = Origin("12345678901234567890123456789012", "here", "/home/us/my runs/atlas")
THEIRS = Origin("12345678901234567890123456789013", "there", "/home/them/runs/atlas")


async def test_a_second_run_of_the_same_name_is_refused_before_anything_is_written(backend):
    buffer = backend.make()
    await buffer.recover(0, MethodState(fields={"phase": 1}), origin=OURS)
    await buffer.announce(0, "v0")
    await buffer.admit("w", 0, 2)
    await buffer.put(make_trajectory(0, 0))
    before = await buffer.state(), await buffer.ledger()
    with pytest.raises(ConfigError) as refused:
        await backend.make(max_staleness=0).recover(0, MethodState(sizes={0: 7}), least_epoch=9, origin=THEIRS)
    assert "\n" not in str(refused.value)
    for said in (
        "Redis holds another run",
        "made in /home/us/my runs/atlas on here",
        "choose another run.name",
        "reset",
    ):
        assert said in str(refused.value)
    assert (await buffer.state(), await buffer.ledger()) == before
    assert await backend.sizes() == {}
    await buffer.announce(0, "v0")  # is still the learner


async def test_another_run_is_named_before_its_shape_or_its_steps_are(backend):
    buffer = backend.make()
    await buffer.recover(0, origin=OURS)
    await buffer.announce(0, "v0")
    await buffer.admit("w", 0, 2)
    await buffer.recover(2, origin=OURS)
    with pytest.raises(ConfigError, match="another run"):
        await backend.make(questions=3).recover(0, origin=THEIRS)


async def test_a_run_goes_on_from_wherever_its_folder_is_now(backend):
    await backend.make().recover(0, origin=OURS)
    moved = Origin(OURS.run_id, "elsewhere", "/mnt/atlas")
    heir = backend.make()
    await heir.recover(0, origin=moved)
    assert heir.epoch == 2
    assert (await heir.state()).origin == moved


async def test_a_run_from_before_origins_were_kept_is_taken_on(backend):
    buffer = backend.make()
    await buffer.recover(0)
    assert (await buffer.state()).origin is None
    await backend.make().recover(0, origin=OURS)
    assert (await buffer.state()).origin == OURS


def test_a_folder_that_was_moved_is_the_same_run_and_a_new_one_is_another(tmp_path):
    run_folder.mark(tmp_path / "a", "atlas")
    known = origin_of(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    refuse_another("atlas", known, tmp_path / "b")
    refuse_another("atlas", None, tmp_path / "a")
    for made_new in (False, True):
        if made_new:
            run_folder.mark(tmp_path / "a", "atlas")
        with pytest.raises(ConfigError, match=f"another run 'atlas', made in {tmp_path / 'a'} on "):
            refuse_another("atlas", known, tmp_path / "a")


def test_who_may_delete_what_redis_holds(tmp_path):
    run_folder.mark(tmp_path / "a", "atlas")
    run_folder.mark(tmp_path / "b", "atlas")
    known = origin_of(tmp_path / "a")
    assert may_delete(known, tmp_path / "a")
    assert may_delete(None, tmp_path / "b"), "nobody's"
    assert not may_delete(known, tmp_path / "b")
    assert not may_delete(known, tmp_path / "nowhere")
    shutil.rmtree(tmp_path / "a")
    elsewhere = Origin(known.run_id, "another-host", known.folder)
    assert may_delete(known, tmp_path / "a"), "its folder has gone"
    assert may_delete(elsewhere, tmp_path / "a"), "its folder has gone, or its host has a new name"
    run_folder.mark(tmp_path / "a", "atlas")
    assert may_delete(known, tmp_path / "a"), "its folder was replaced"
    assert not may_delete(elsewhere, tmp_path / "a"), "two hosts with the same paths"
