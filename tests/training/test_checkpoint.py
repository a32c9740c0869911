"""Checkpoints: complete or absent, and safe from learners that have been replaced."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from cusearch_async.config import STARTER, load_config
from cusearch_async.errors import ConfigError, ContractMismatch, WriteFailed
from cusearch_async.files import append_row
from cusearch_async.run.history import record_start
from cusearch_async.run.provenance import weights_of
from cusearch_async.training import checkpoint
from cusearch_async.training.checkpoint import Checkpoints, CheckpointState, check_same_run
from cusearch_async.training.selector import initial_method_state
from cusearch_async.transport.interface import MethodState, RunState

UNKNOWN = RunState()


def state_at(step: int) -> CheckpointState:
    sizes = {step * 4: 6, step * 4 + 1: 1}
    method = MethodState(memory='{"visits": "é"}', fields={"phase": step // 2}, sizes=sizes)
    return CheckpointState(step=step, method=method, ranks=1, zero_stage=1, fixed={"model.dtype": "float32"})


def learner(tmp_path, keep=3, epoch=1, step=0) -> Checkpoints:
    """The checkpoints as the learner of `epoch` sees them, which went on from `step`."""
    checkpoints = Checkpoints(tmp_path, keep)
    checkpoints.begin(epoch, step)
    record_start(load_config(Path("atlas"), ["--run.folder", str(tmp_path)]), epoch, step)
    return checkpoints


def write(checkpoints: Checkpoints, step: int) -> None:
    folder = checkpoints.begin_write(step)
    with checkpoints.write(state_at(step)):
        (folder / "deepspeed").mkdir(parents=True)
        (folder / "deepspeed" / "weights").write_text(str(step))


def save(checkpoints: Checkpoints, step: int) -> int:
    write(checkpoints, step)
    checkpoints.finish(step)
    checkpoints.remove(checkpoints.superfluous())
    return checkpoints.oldest_kept()


def names(tmp_path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "checkpoints").iterdir())


def test_the_newest_complete_checkpoint_is_found_with_its_state(tmp_path):
    checkpoints = learner(tmp_path)
    assert checkpoints.newest(UNKNOWN) is None
    save(checkpoints, 2)
    save(checkpoints, 10)
    found = checkpoints.newest(UNKNOWN)
    assert found.state == state_at(10)
    assert (found.path / "deepspeed" / "weights").read_text() == "10"
    assert names(tmp_path) == ["step000002-e1", "step000010-e1"]


def test_an_unfinished_checkpoint_does_not_count(tmp_path):
    checkpoints = learner(tmp_path)
    save(checkpoints, 2)
    write(checkpoints, 4)
    assert checkpoints.newest(UNKNOWN).state.step == 2


def test_a_checkpoint_with_an_incomplete_state_does_not_count(tmp_path):
    checkpoints = learner(tmp_path)
    save(checkpoints, 2)
    save(checkpoints, 4)
    (tmp_path / "checkpoints" / "step000004-e1" / "state.json").write_text('{"step": 4')
    assert checkpoints.newest(UNKNOWN).state.step == 2


@pytest.mark.parametrize(
    ("was", "now"), [('"step":4', '"step":5'), ('"phase":2', '"phase":0'), ('"bytes":1', '"bytes":2')]
)
def test_a_changed_state_is_noticed(tmp_path, caplog, was, now):
    checkpoints = learner(tmp_path)
    save(checkpoints, 2)
    save(checkpoints, 4)
    path = tmp_path / "checkpoints" / "step000004-e1" / "state.json"
    assert was in path.read_text()
    path.write_text(path.read_text().replace(was, now))
    assert checkpoints.newest(UNKNOWN).state.step == 2
    assert "step000004-e1 has no state that can be read (state.json was changed after it was written)" in caplog.text


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_text("5"),
        lambda file: file.write_text("4 and more"),
        lambda file: file.unlink(),
        lambda file: (file.unlink(), file.mkdir()),
    ],
)
def test_an_incomplete_file_is_named_and_the_checkpoint_before_is_taken(tmp_path, caplog, damage):
    checkpoints = learner(tmp_path)
    save(checkpoints, 2)
    save(checkpoints, 4)
    newest = checkpoints.newest(UNKNOWN)
    assert (newest.state.step, list(newest.files), newest.damaged()) == (4, ["deepspeed/weights"], [])
    damage(newest.path / "deepspeed" / "weights")
    assert checkpoints.newest(UNKNOWN).state.step == 2
    assert "step000004-e1 is damaged (deepspeed/weights); it is skipped" in caplog.text


def test_old_checkpoints_go_and_pools_are_forgotten_only_once_enough_are_kept(tmp_path):
    checkpoints = learner(tmp_path, keep=2)
    assert [save(checkpoints, step) for step in (2, 4, 6, 8)] == [0, 2, 4, 6]
    assert names(tmp_path) == ["step000006-e1", "step000008-e1"]


def score(tmp_path, step: int, em: float, epoch: int = 1) -> None:
    append_row(tmp_path / "eval.jsonl", {"step": step, "epoch": epoch, "all": {"em": em}})


def test_the_best_scored_checkpoint_is_kept_too(tmp_path):
    checkpoints = learner(tmp_path, keep=1)
    for step, em in ((1, 0.2), (2, 0.6), (3, 0.6), (4, 0.5)):
        save(checkpoints, step)
        score(tmp_path, step, em)
    assert names(tmp_path) == ["step000002-e1", "step000004-e1"], "the first of two as good"
    assert checkpoints.best().state.step == 2
    save(checkpoints, 5)
    score(tmp_path, 5, 0.7)
    save(checkpoints, 6)
    assert names(tmp_path) == ["step000005-e1", "step000006-e1"]


def test_without_gold_answers_the_best_has_the_highest_reward(tmp_path):
    """All had an exact match of 0: the first that was scored stayed for ever, and the best was deleted."""
    checkpoints = learner(tmp_path, keep=1)
    for step, reward in ((1, 0.1), (2, 0.7), (3, 0.5)):
        save(checkpoints, step)
        row = {"step": step, "epoch": 1, "all": {"em": 0.0, "reward": reward}}
        append_row(tmp_path / "eval.jsonl", row)
    save(checkpoints, 4)
    assert names(tmp_path) == ["step000002-e1", "step000004-e1"]


def test_scores_are_parsed_once(tmp_path, monkeypatch):
    """A file of many versions took seconds at each checkpoint, in which the learner answered nobody."""
    checkpoints, parsed, loads = learner(tmp_path, keep=1), [], json.loads
    for step, em in ((1, 0.2), (2, 0.6)):
        save(checkpoints, step)
        score(tmp_path, step, em)
    monkeypatch.setattr("cusearch_async.metrics.files.json.loads", lambda line: parsed.append(line) or loads(line))
    for _ in range(3):
        assert checkpoints.best().state.step == 2
    assert len(parsed) <= 2
    assert checkpoints._scores.read([(1, 0)])[0].keys() == {"step", "epoch", "all", "each"}


def test_the_best_is_of_one_set_of_questions(tmp_path):
    """Those of the newest score: a run may go on with other held-out questions."""
    checkpoints = learner(tmp_path, keep=3)
    for step, em, asked in ((1, 0.9, "ab"), (2, 0.3, "cd"), (3, 0.6, "cd")):
        save(checkpoints, step)
        row = {"step": step, "epoch": 1, "all": {"em": em}, "each": {"question_id": list(asked)}}
        append_row(tmp_path / "eval.jsonl", row)
    assert checkpoints.best().state.step == 3


def test_the_best_of_a_course_that_was_left_does_not_count(tmp_path):
    first = learner(tmp_path, keep=1)
    for step, em in ((1, 0.2), (3, 0.9)):
        save(first, step)
        score(tmp_path, step, em)
    again = learner(tmp_path, keep=1, epoch=2, step=1)
    assert again.best().state.step == 1, "step 3 is made again"
    save(again, 3)
    assert names(tmp_path) == ["step000001-e1", "step000003-e2"]


def test_a_checkpoint_without_an_epoch_in_its_name_is_none(tmp_path, caplog):
    save(learner(tmp_path), 2)
    folder = tmp_path / "checkpoints" / "step000002-e1"
    folder.rename(folder.with_name("step000002"))
    with pytest.raises(ConfigError, match="cannot be read by this version"):
        Checkpoints(tmp_path, keep=2).newest(UNKNOWN)
    assert "step000002 has no state that can be read (its name is not stepSTEP-eEPOCH); it is skipped" in caplog.text


@pytest.mark.parametrize("content", ["{}", '{"step": 10, "phase": 2, "ranks": 1, "zero_stage": 1}'])
def test_a_run_whose_checkpoints_cannot_be_read_does_not_begin_at_step_0(tmp_path, content):
    checkpoints = learner(tmp_path)
    save(checkpoints, 2)
    (tmp_path / "checkpoints" / "step000002-e1" / "state.json").write_text(content)
    with pytest.raises(ConfigError, match="cannot be read by this version"):
        checkpoints.newest(UNKNOWN)


@pytest.mark.parametrize(
    ("known", "step"),
    [
        (RunState(), 8),
        (RunState(epoch=1, step=9), 8),
        (RunState(epoch=1, step=7), 6),
        (RunState(epoch=1, step=6, checkpoint=4), 6),
        (RunState(epoch=1, step=3, checkpoint=2), 8),
        (RunState(epoch=1, step=5, checkpoint=5), 8),
    ],
)
def test_a_run_goes_on_where_redis_can_go_on_with_it(tmp_path, known, step):
    checkpoints = learner(tmp_path)
    for saved in (4, 6, 8):
        save(checkpoints, saved)
    assert checkpoints.newest(known).state.step == step


def test_of_one_step_the_later_learner_counts(tmp_path):
    save(learner(tmp_path), 4)
    later = learner(tmp_path, epoch=2, step=2)
    save(later, 4)
    assert later.newest(UNKNOWN).epoch == 2


def test_what_an_earlier_learner_wrote_beyond_a_step_gone_back_to_is_of_another_course(tmp_path):
    """Redis had lost steps: epoch 2 went on from 2. What it trains from there on is not what 4-e1 has behind it."""
    earlier = learner(tmp_path)
    save(earlier, 2)
    save(earlier, 4)
    later = learner(tmp_path, epoch=2, step=2)
    assert later.newest(UNKNOWN).path.name == "step000002-e1"
    save(later, 3)
    assert later.newest(UNKNOWN).path.name == "step000003-e2"
    assert names(tmp_path) == ["step000002-e1", "step000003-e2"]


def test_a_run_that_was_begun_again_has_no_checkpoint_until_it_writes_one(tmp_path):
    """Epoch 2 had found none, and began at step 0; then epoch 1 finished its first."""
    save(learner(tmp_path), 5)
    later = learner(tmp_path, epoch=2, step=0)
    assert later.newest(UNKNOWN) is None, "nothing is damaged"
    save(later, 1)
    assert later.newest(UNKNOWN).path.name == "step000001-e2"
    (tmp_path / "checkpoints" / "step000001-e2" / "deepspeed" / "weights").write_text("?")
    with pytest.raises(ConfigError, match="are damaged"):
        later.newest(UNKNOWN)


def test_a_learner_that_wakes_up_after_its_successor_finished_the_same_step_deletes_nothing_of_it(tmp_path):
    """keep = 1; it sleeps before it renames, and another one before it deletes what it found superfluous."""
    sleeper = learner(tmp_path, keep=1)
    save(sleeper, 2)
    write(sleeper, 4)
    successor = learner(tmp_path, keep=1, epoch=2, step=2)
    save(successor, 4)
    with pytest.raises(WriteFailed, match=r"cannot write .*step000004-e1"):
        sleeper.finish(4)
    assert names(tmp_path) == ["step000004-e2"]

    write(successor, 6)
    successor.finish(6)
    decided = successor.superfluous()
    third = learner(tmp_path, keep=1, epoch=3, step=6)
    save(third, 8)
    successor.remove(decided)
    assert successor.superfluous() == []
    assert names(tmp_path) == ["step000008-e3"]


def test_the_starts_in_the_folder_decide_for_whoever_looks(tmp_path):
    save(learner(tmp_path), 4)
    assert Checkpoints(tmp_path, keep=1).latest().state.step == 4
    learner(tmp_path, epoch=2, step=2)
    assert Checkpoints(tmp_path, keep=1).latest() is None
    assert Checkpoints(tmp_path, keep=1).highest_epoch() == 2


def test_what_earlier_learners_left_half_done_is_cleared_at_the_start(tmp_path):
    first = learner(tmp_path, epoch=1)
    save(first, 2)
    write(first, 4)
    (tmp_path / "checkpoints" / "step000001-e1" / "model").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".unfinished-step000007-e3" / "model").mkdir(parents=True)
    (tmp_path / "checkpoints" / "notes").mkdir()
    assert Checkpoints(tmp_path, keep=2).highest_epoch() == 3
    learner(tmp_path, epoch=3, step=2)
    assert names(tmp_path) == [".unfinished-step000007-e3", "notes", "step000002-e1"]


def test_a_full_disk_is_one_line_and_its_space_is_free_again(tmp_path, monkeypatch):
    checkpoints = learner(tmp_path)
    save(checkpoints, 2)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteFailed, match=r"^cannot write .*/\.unfinished-step000004-e1: No space left on device$"):
        write(checkpoints, 4)
    assert names(tmp_path) == ["step000002-e1"]
    monkeypatch.undo()
    save(checkpoints, 4)
    assert checkpoints.newest(UNKNOWN).state.step == 4


def test_a_checkpoint_that_does_not_read_back_does_not_count(tmp_path, monkeypatch):
    checkpoints = learner(tmp_path)
    save(checkpoints, 2)
    write(checkpoints, 4)
    monkeypatch.setattr(checkpoint, "_is_intact", lambda path, facts: False)
    with pytest.raises(WriteFailed, match=r"step000004-e1: deepspeed/weights cannot be read back"):
        checkpoints.finish(4)
    assert names(tmp_path) == ["step000002-e1"]


# --- the same run -----------------------------------------------------------------------------------------

LORA, STEPS = ("--learner.lora.rank", "8"), ("--run.steps", "10")


@pytest.fixture
def refused(atlas_config, tmp_path):
    """What a learner is told that would go on from step 10 and phase 3 with other settings."""

    def check(was: tuple[str, ...], now: tuple[str, ...]) -> str:
        method = MethodState(memory='{"phase": 3}')
        saved = checkpoint.state_at(10, method, load_config(atlas_config, [*STEPS, *was]))
        check_same_run(tmp_path, saved, load_config(atlas_config, [*STEPS, *was]))
        with pytest.raises(ConfigError) as error:
            check_same_run(tmp_path, saved, load_config(atlas_config, [*STEPS, *was, *now]))
        return str(error.value)

    return check


@pytest.mark.parametrize("settings", [LORA, ("--learner.trained_layers", "1"), ("--loss.kl_coef", "0")])
def test_a_fork_does_not_continue_an_adapter_on_another_base(atlas_config, tmp_path, settings):
    """A fork has no start to compare with: its adapter continued on whatever model.path held."""
    model = shutil.copytree(STARTER, tmp_path / "model")
    config = load_config(atlas_config, [*STEPS, "--model.path", str(model), *settings])
    saved = msgspec.structs.replace(
        checkpoint.state_at(10, MethodState(memory='{"phase": 3}'), config), weights=weights_of(str(model))
    )
    check_same_run(tmp_path, saved, config)
    tensors = load_file(model / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, model / "model.safetensors", {"format": "pt"})
    if "kl_coef" in settings[0]:
        check_same_run(tmp_path, saved, config)
        return
    with pytest.raises(ContractMismatch, match=r"weights of model\.path is \d+ bytes \(\w+\) here and \d+ bytes"):
        check_same_run(tmp_path, saved, config)
    check_same_run(tmp_path, saved, config, accepts_changes=True)


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ((), ("--model.dtype", "bfloat16"), "model.dtype is bfloat16 here and float32 in the run"),
        ((), ("--pool.rollouts", "4"), "pool.rollouts is 4 here and 3 in the run"),
        (
            (),
            ("--pool.questions", "65"),
            "groups per step (pool.questions, or K / G for grpo_half) is 65 here and 64 in",
        ),
        ((), LORA, "learner.lora.rank is 8 here and 0 in the run"),
        (LORA, ("--learner.lora.rank", "0"), "learner.lora.rank is 0 here and 8 in the run"),
        (LORA, ("--learner.lora.rank", "16"), "learner.lora.rank is 16 here and 8 in the run"),
        (LORA, ("--learner.lora.alpha", "8"), "learner.lora.alpha is 8 here and 32 in the run"),
        (LORA, ("--learner.lora.targets", "q_proj"), "learner.lora.targets is ['q_proj'] here and ['all-linear'] in"),
    ],
)
def test_what_a_checkpoint_cannot_be_loaded_with_is_refused_also_where_changes_are_accepted(
    refused, tmp_path, was, now, said
):
    error = refused(was, now)
    assert error.startswith(f"this process does not match run 'atlas': {said}")
    assert error.endswith(f"; {tmp_path} was saved with these: `cusearch reset` to change them")


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (("--run.steps", "5"), "run.steps = 5, but 10 steps are done (X); set it to at least that"),
        (("--episode.s_max", "3"), "episode.s_max = 3, but the run has reached phase 3; set it to 4 or more"),
    ],
)
def test_settings_that_the_checkpoint_is_past_are_refused(refused, tmp_path, now, said):
    assert refused((), now) == said.replace("X", str(tmp_path))


@pytest.mark.parametrize(("was", "now"), [("sdga_phase", "ar3po"), ("ar3po", "sdga_phase")])
def test_a_method_begins_anew_behind_one_with_another_memory(atlas_config, tmp_path, caplog, was, now):
    before, after = (load_config(atlas_config, [*STEPS, "--method.name", name]) for name in (was, now))
    saved = checkpoint.state_at(10, initial_method_state(before.method, before.episode.s_max), before)
    caplog.set_level("INFO")
    assert check_same_run(tmp_path, saved, after) == initial_method_state(after.method, after.episode.s_max)
    assert "holds the memory of another method" in caplog.text
    assert caplog.text.count("memory") == 1
    assert check_same_run(tmp_path, saved, before) == saved.method


@pytest.mark.parametrize("now", ["random", "grpo_full", "dapo", "sdga_auto", "stratified_grpo", "topk_reward"])
def test_a_method_without_memory_takes_over_no_group_sizes(atlas_config, tmp_path, now):
    before, after = (load_config(atlas_config, [*STEPS, "--method.name", name]) for name in ("ar3po", now))
    method = MethodState(memory='{"visits":{"q":[[1,3]]}}', sizes={640: 1})
    assert check_same_run(tmp_path, checkpoint.state_at(10, method, before), before) == method
    found = check_same_run(tmp_path, checkpoint.state_at(10, method, before), after)
    assert found == initial_method_state(after.method, after.episode.s_max)


@pytest.mark.parametrize("changes", [("--learner.ranks", "2"), ("--learner.zero_stage", "3")])
def test_other_ranks_and_another_zero_stage_go_on_and_are_logged(atlas_config, tmp_path, caplog, changes):
    saved = checkpoint.state_at(10, MethodState(memory='{"phase": 3}'), load_config(atlas_config, [*STEPS]))
    caplog.set_level("INFO")
    check_same_run(tmp_path, saved, load_config(atlas_config, [*STEPS]))
    assert not caplog.records
    check_same_run(tmp_path, saved, load_config(atlas_config, [*STEPS, *changes]))
    [record] = caplog.records
    assert "was saved by 1 ranks, ZeRO-1; resharding the optimizer state to " in record.message


def test_the_curves_before_a_checkpoint_are_on_disk_when_it_counts(tmp_path, monkeypatch):
    """After a crash of the machine their steps are not made again: a study's run could never be finished."""
    done, put = [], checkpoint.put_in_place
    monkeypatch.setattr(checkpoint, "sync", lambda path: done.append(path.name))
    monkeypatch.setattr(checkpoint, "put_in_place", lambda path: done.append(path.name) or put(path))
    (tmp_path / "metrics.jsonl").write_text("")
    save(learner(tmp_path), 2)
    assert done == ["metrics.jsonl", "step000002-e1"]
