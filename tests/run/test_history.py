"""A resume is the same run, or says what changed."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from msgspec import structs

from cusearch_async.config import load_config
from cusearch_async.errors import ConfigError
from cusearch_async.models import load_tokenizer
from cusearch_async.run import history as starts
from cusearch_async.run.contract import contract_of
from cusearch_async.run.history import (
    Start,
    changed_settings,
    made_otherwise,
    read_starts,
    read_stop,
    record_start,
    record_stop,
    refuse_changes,
)
from cusearch_async.run.provenance import COMMAND, Computing, weights_of
from cusearch_async.training.checkpoint import CheckpointState, check_same_run
from cusearch_async.training.publishing import state_at
from cusearch_async.transport.interface import MethodState
from tests.fakes import STARTER
from tests.run.questions import CHANGED, QUESTIONS


@pytest.fixture
def config_of(atlas_config, tmp_path):
    return lambda *overrides: load_config(atlas_config, ["--run.folder", str(tmp_path / "run"), *overrides])


def test_a_start_keeps_its_settings_and_what_it_was_made_with(config_of):
    record_start(config_of(), epoch=1, step=0)
    record_start(config_of("--run.steps", "30"), epoch=2, step=10)
    folder = config_of().folder
    assert sorted(path.name for path in (folder / "starts").iterdir()) == [
        "0001.json",
        "0001.toml",
        "0002.json",
        "0002.toml",
    ]
    first, second = read_starts(folder)
    assert (first.epoch, first.step, second.epoch, second.step) == (1, 0, 2, 10)
    assert (first.pid, first.argv) == (os.getpid(), sys.argv)
    assert first.versions.keys() >= {"python", "torch", "deepspeed", "transformers"}
    assert load_config(folder / "starts" / "0001.toml") == config_of()
    assert load_config(folder / "config.toml") == config_of("--run.steps", "30")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("method.name", "random", "method.name: 'sdga_phase' -> 'random', method.phase_reserve: 0.5 -> none"),
        ("run.seed", "1", "run.seed: 0 -> 1"),
        ("learner.lr", "0.5", "learner.lr: 5e-05 -> 0.5"),
        ("data.source", "mine.jsonl", "data.source: ['atlas'] -> ['mine.jsonl']"),
        ("episode.temperature", "0.7", "episode.temperature: 1.0 -> 0.7"),
        ("pool.max_staleness", "1", "pool.max_staleness: 2 -> 1"),
        ("loss.correction", "none", "loss.correction: 'tis' -> 'none'"),
        ("retriever.backend", "dense", "retriever.backend: 'bm25' -> 'dense'"),
        ("loss.dual_clip", "3.0", "loss.dual_clip: none -> 3.0"),
        ("learner.lora.rank", "8", "learner.lora.rank: 0 -> 8"),
        ("rollout.vllm.quantization", "fp8", "rollout.vllm.quantization: none -> 'fp8'"),
        ("rollout.vllm.kv_cache_dtype", "fp8", "rollout.vllm.kv_cache_dtype: 'auto' -> 'fp8'"),
        ("rollout.vllm.calculate_kv_scales", "true", "rollout.vllm.calculate_kv_scales: none -> True"),
        ("rollout.recompute_kv", "false", "rollout.recompute_kv: True -> False"),
    ],
)
def test_what_changes_the_meaning_of_a_run_is_refused_in_one_line_unless_accepted(config_of, caplog, key, value, said):
    record_start(config_of(), epoch=1, step=0)
    changed = config_of(f"--{key}", value, "--run.stall_s", "7")
    with pytest.raises(ConfigError) as refused:
        refuse_changes(changed, accept=False)
    assert str(refused.value) == (
        f"run 'atlas' would not be the same run: {said}; choose another run.name, or accept the "
        "changes with --accept-changes"
    )
    with caplog.at_level(logging.INFO):
        refuse_changes(changed, accept=True)
    assert {record.message for record in caplog.records} == {
        f"since the last start: {change}" for change in (*said.split(", "), "run.stall_s: 1800.0 -> 7.0")
    }


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.steps", "99"),
        ("rollout.max_episodes", "200"),
        ("redis.outage_s", "9"),
        ("learner.checkpoint_every", "3"),
        ("learner.deepspeed.zero_optimization.offload_optimizer.device", "cpu"),
        ("retriever.max_answer_mib", "8"),
        ("retriever.web.per_second", "1"),
    ],
)
def test_what_only_says_how_a_run_works_is_logged(config_of, caplog, key, value):
    record_start(config_of(), epoch=1, step=0)
    with caplog.at_level(logging.INFO):
        refuse_changes(config_of(f"--{key}", value), accept=False)
    [record] = caplog.records
    assert record.message.startswith(f"since the last start: {key}: ")


def test_a_run_from_before_starts_were_kept_is_compared_with_its_config(config_of):
    record_start(config_of(), epoch=1, step=0)
    for path in (config_of().folder / "starts").iterdir():
        path.unlink()
    with pytest.raises(ConfigError, match=r"run\.seed: 0 -> 3"):
        refuse_changes(config_of("--run.seed", "3"), accept=False)


def test_a_torn_start_is_named_and_the_one_before_is_compared_with(config_of, caplog):
    record_start(config_of(), epoch=1, step=0)
    for name in ("0002.toml", "0002.json"):
        (config_of().folder / "starts" / name).write_text('[run]\nname = "at')
    with pytest.raises(ConfigError, match=r"run\.seed: 0 -> 3"):
        refuse_changes(config_of("--run.seed", "3"), accept=False)
    assert "0002.toml is not a config that can be used now" in caplog.text
    assert "0002.toml cannot be read" in caplog.text
    assert [start.epoch for start in read_starts(config_of().folder)] == [1]


def contract(questions=QUESTIONS, model=STARTER):
    config = load_config(Path("atlas"), ["--model.path", str(model)])
    return contract_of(config, questions, load_tokenizer(str(model)))


@pytest.mark.parametrize("questions", CHANGED.values(), ids=CHANGED)
def test_questions_that_changed_under_the_same_name_are_refused_unless_accepted(config_of, caplog, questions):
    before, after = contract(), contract(questions)
    record_start(config_of(), epoch=1, step=0, contract=before)
    refuse_changes(config_of(), accept=False, contract=contract())
    said = f"data.source: its questions have changed: {before.terms['data.source']} -> {after.terms['data.source']}"
    with pytest.raises(ConfigError) as refused:
        refuse_changes(config_of(), accept=False, contract=after)
    assert str(refused.value) == (
        f"run 'atlas' would not be the same run: {said}; choose another run.name, or accept the "
        "changes with --accept-changes"
    )
    assert before.terms["data.source"].startswith("3 (")
    with caplog.at_level(logging.INFO):
        refuse_changes(config_of(), accept=True, contract=after)
    assert f"since the last start: {said}" in caplog.text
    record_start(config_of(), epoch=2, step=0, contract=after)
    refuse_changes(config_of(), accept=False, contract=after)


def test_a_retriever_that_serves_another_corpus_is_refused_unless_accepted(config_of):
    """Though it is the same file name; and a learner that has not asked it yet is not refused for that."""
    record_start(config_of(), epoch=1, step=0, contract=contract().with_retriever("bm25 over 2 passages (1)"))
    refuse_changes(config_of(), accept=False, contract=contract())
    after = contract().with_retriever("bm25 over 3 passages (2)")
    said = r"retriever serves: that has changed: bm25 over 2 passages \(1\) -> bm25 over 3 passages \(2\); choose"
    with pytest.raises(ConfigError, match=said):
        refuse_changes(config_of(), accept=False, contract=after)
    refuse_changes(config_of(), accept=True, contract=after)


@pytest.mark.parametrize(
    ("file", "was", "is_now"),
    [
        ("config.json", b'"rms_norm_eps": 1e-06', b'"rms_norm_eps": 1e-05'),
        ("tokenizer.json", b'"</search>"', b'"</Search>"'),
    ],
)
def test_a_model_that_changed_under_the_same_name_is_refused(config_of, tmp_path, file, was, is_now):
    model = tmp_path / "model"
    shutil.copytree(STARTER, model, ignore=shutil.ignore_patterns("*.safetensors"))
    record_start(config_of(), epoch=1, step=0, contract=contract(model=model))
    content = (model / file).read_bytes()
    assert was in content
    (model / file).write_bytes(content.replace(was, is_now))
    with pytest.raises(ConfigError, match=r"model\.path: its config or tokenizer has changed: 384 tokens \(.* -> "):
        refuse_changes(config_of(), accept=False, contract=contract(model=model))


def test_a_start_keeps_the_command_that_was_typed_beside_the_learners_own(config_of, monkeypatch):
    typed = ["/usr/bin/cusearch", "launch", "atlas", "--run.name", "two words"]
    monkeypatch.setenv(COMMAND, shlex.join(typed))
    record_start(config_of(), epoch=1, step=0)
    monkeypatch.delenv(COMMAND)
    record_start(config_of(), epoch=2, step=0)
    first, second = read_starts(config_of().folder)
    assert (first.launched, first.argv) == (typed, sys.argv)
    assert second.launched == []


def test_a_start_keeps_a_checksum_of_the_models_weights(config_of, tmp_path, caplog):
    model = tmp_path / "model"
    shutil.copytree(STARTER, model)
    again = tmp_path / "again"
    shutil.copytree(STARTER, again)
    assert weights_of(str(model)) == weights_of(str(again)) != ""
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    for place in (9, len(content) // 2, len(content) - 1):
        content[place] ^= 1
        weights.write_bytes(content)
        assert weights_of(str(model)) != weights_of(str(again))
        content[place] ^= 1
    weights.write_bytes(content)
    assert weights_of(str(model)) == weights_of(str(again))
    record_start(config_of("--model.path", str(model)), epoch=1, step=0)
    [start] = read_starts(config_of().folder)
    assert start.weights == weights_of(str(model))
    assert not caplog.records


def test_weights_that_cannot_be_read_are_named_and_do_not_end_the_start(config_of, tmp_path, caplog):
    model = tmp_path / "model"
    shutil.copytree(STARTER, model)
    weights = model / "model.safetensors"
    weights.unlink()
    weights.symlink_to(tmp_path / "gone")
    assert weights_of(str(model)) == ""
    assert f"the weights of {model} cannot be read" in caplog.text


def test_another_name_is_said_once_and_a_start_without_a_contract_is_not_compared_with(config_of):
    record_start(config_of(), epoch=1, step=0)
    refuse_changes(config_of(), accept=False, contract=contract())
    record_start(config_of(), epoch=2, step=0, contract=contract())
    with pytest.raises(ConfigError, match=r"data\.source") as refused:
        refuse_changes(config_of("--data.source", "mine.jsonl"), accept=False, contract=contract(QUESTIONS[:1]))
    assert "its questions" not in str(refused.value)


def test_settings_are_compared_one_by_one():
    was = {"a": {"x": 1, "y": [1], "z": 2}, "b": True}
    assert changed_settings(was, {"a": {"x": 1, "y": [2]}, "b": False, "c": 0}) == {
        "a.y": "[1] -> [2]",
        "b": "True -> False",
        "c": "none -> 0",
        "a.z": "2 -> none",
    }


def test_a_folder_that_cannot_be_written_is_one_line(config_of):
    config_of().folder.parent.mkdir(exist_ok=True)
    config_of().folder.write_text("a file")
    with pytest.raises(ConfigError, match=r"^run.folder .*/run/starts cannot be written: Not a directory"):
        record_start(config_of(), epoch=1, step=0)


SAVED = CheckpointState(
    step=10,
    method=MethodState(memory='{"phase": 3}'),
    ranks=1,
    zero_stage=1,
    dtype="float32",
    questions=64,
    rollouts=3,
)


@pytest.mark.parametrize("changes", [("--learner.ranks", "2"), ("--learner.zero_stage", "3")])
def test_other_ranks_and_another_zero_stage_go_on_and_are_logged(config_of, tmp_path, caplog, changes):
    with caplog.at_level(logging.INFO):
        check_same_run(tmp_path, SAVED, config_of("--run.steps", "10"))
        assert not caplog.records
        check_same_run(tmp_path, SAVED, config_of("--run.steps", "10", *changes))
    [record] = caplog.records
    assert "was saved by 1 ranks with ZeRO stage 1; its state is divided again, for " in record.message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("--run.steps", "5"), "run.steps = 5, but 10 steps are done (X); set it to at least that"),
        (("--episode.s_max", "3"), "episode.s_max = 3, but X has reached phase 3; set it to 4 or more"),
        (
            ("--model.dtype", "bfloat16"),
            "X was saved with model.dtype = float32, and the run can only continue with that, got bfloat16; "
            "set it back, or `cusearch reset` the run",
        ),
        (
            ("--learner.lora.rank", "8"),
            "X was saved with learner.lora.rank = 0, and the run can only continue with that, got 8; "
            "set it back, or `cusearch reset` the run",
        ),
        (
            ("--pool.rollouts", "4"),
            "X was saved with pool.rollouts = 3, and the run can only continue with that, got 4; set it "
            "back, or `cusearch reset` the run",
        ),
    ],
)
def test_what_cannot_go_on_is_refused_in_one_line(config_of, tmp_path, changes, said):
    with pytest.raises(ConfigError) as refused:
        check_same_run(tmp_path, SAVED, config_of(*changes))
    assert str(refused.value) == said.replace("X", str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("--learner.lora.rank", "0"), "rank = 8, and the run can only continue with that, got 0"),
        (("--learner.lora.rank", "16"), "rank = 8, and the run can only continue with that, got 16"),
        (("--learner.lora.alpha", "8"), "alpha = 32, and the run can only continue with that, got 8"),
        (
            ("--learner.lora.targets", "q_proj"),
            "targets = ['all-linear'], and the run can only continue with that, got ['q_proj']",
        ),
    ],
)
def test_another_adapter_is_refused_by_name_even_if_changes_are_accepted(config_of, tmp_path, changes, said):
    lora = ("--learner.lora.rank", "8")
    saved = state_at(0, MethodState(memory='{"phase": 0}'), config_of(*lora))
    check_same_run(tmp_path, saved, config_of(*lora))
    with pytest.raises(ConfigError) as refused:
        check_same_run(tmp_path, saved, config_of(*lora, *changes))
    assert str(refused.value).startswith(f"{tmp_path} was saved with learner.lora.{said}; set it back, ")


def test_a_learner_that_wakes_after_its_successor_leaves_the_successors_settings_in_place(config_of):
    record_start(config_of("--run.steps", "30"), epoch=10, step=0)
    record_start(config_of("--run.steps", "20"), epoch=9, step=0)
    folder = config_of().folder
    assert load_config(folder / "config.toml") == config_of("--run.steps", "30")
    assert load_config(folder / "starts" / "0009.toml") == config_of("--run.steps", "20")


def test_a_learner_that_sleeps_before_it_writes_config_toml_looks_once_more(config_of, monkeypatch):
    write = starts.write_file

    def write_late(path, content):
        if path.name == "config.toml":
            monkeypatch.setattr(starts, "write_file", write)
            record_start(config_of("--run.steps", "30"), epoch=2, step=0)
        write(path, content)

    monkeypatch.setattr(starts, "write_file", write_late)
    record_start(config_of(), epoch=1, step=0)
    assert load_config(config_of().folder / "config.toml") == config_of("--run.steps", "30")


def test_settings_of_the_last_start_that_cannot_be_used_any_more_are_compared_all_the_same(config_of, tmp_path):
    """The module of its method is gone: what else has changed is not overlooked."""
    record_start(config_of(), epoch=1, step=0)
    settings = tmp_path / "run" / "starts" / "0001.toml"
    assert settings.exists()
    settings.write_text(settings.read_text().replace('name = "sdga_phase"', 'name = "gone_module:Method"'))
    with pytest.raises(ConfigError, match=r"method.name: 'gone_module:Method' -> 'sdga_phase'.*learner.lr"):
        refuse_changes(config_of("--learner.lr", "0.5"), accept=False)


def test_how_a_learner_ended_is_kept_beside_its_start(atlas_config, tmp_path):
    config = load_config(atlas_config, ["--run.folder", str(tmp_path)])
    record_start(config, 1, 0)
    assert read_stop(tmp_path, 1) is None, "it runs, or was killed"
    record_stop(config, 1, 12, "finished")
    assert (read_stop(tmp_path, 1).step, read_stop(tmp_path, 1).outcome) == (12, "finished")
    assert [start.epoch for start in read_starts(tmp_path)] == [1]


def test_a_disk_that_takes_no_ending_is_only_named(atlas_config, tmp_path, caplog):
    config = load_config(atlas_config, ["--run.folder", str(tmp_path)])
    record_start(config, 1, 0)
    (tmp_path / "starts" / "0001.stop").mkdir()
    record_stop(config, 1, None, "NaN")
    assert "0001.stop cannot be written" in caplog.text


CHANGES = [
    ({"versions": {"torch": "2"}}, {"package.torch": "'1' -> '2'"}),
    ({"machine": {"cores": 8}}, {"machine.cores": "4 -> 8"}),
    ({"computing": Computing(2, 3, "cpu")}, {"computing.ranks": "1 -> 2"}),
    ({"computing": Computing(1, 4, "cpu")}, {"computing.threads": "3 -> 4"}),
    ({"computing": Computing(1, 3, "gpu")}, {"computing.device": "'cpu' -> 'gpu'"}),
    ({"commit": "b"}, {"commit": "'a' -> 'b'"}),
    ({"contract": {"data.source": "y", "model.path": "m"}}, {"content of data.source": "'x' -> 'y'"}),
    ({"contract": {"data.source": "x", "model.path": "n"}}, {"content of model.path": "'m' -> 'n'"}),
    ({"weights": "other"}, {"weights of model.path": "'some' -> 'other'"}),
    ({"corpus": "other"}, {"content of retriever.corpus": "'some' -> 'other'"}),
    ({"epoch": 2, "step": 9, "time": "later", "host": "b", "pid": 2, "argv": ["x"], "launched": ["y"]}, {}),
    ({"nonce": "another", "buffer": "redis://elsewhere:6379/0"}, {}),
]


@pytest.mark.parametrize(("change", "said"), CHANGES)
def test_whatever_else_a_start_was_made_with_is_told(change, said):
    made_with = {"versions": {"torch": "1"}, "machine": {"cores": 4}, "computing": Computing(1, 3, "cpu")}
    made_with |= {"contract": {"data.source": "x", "model.path": "m"}, "weights": "some", "corpus": "some"}
    made_with |= {"launched": [], "nonce": "n", "buffer": "redis://here:6379/0"}
    start = Start(epoch=1, step=0, time="now", host="a", pid=1, argv=[], commit="a", **made_with)
    assert made_otherwise(start, structs.replace(start, **change)) == said
    named = {name for names, _ in CHANGES for name in names}
    assert named == {*Start.__struct_fields__}, "each field of a start counts, or is known not to"
