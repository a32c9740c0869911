"""A resume is the same run, or reports its changes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys

import huggingface_hub
import pytest
from msgspec import structs
from safetensors.torch import load_file, save_file

from cusearch_async.config import load_config
from cusearch_async.errors import ConfigError, ContractMismatch
from cusearch_async.run import history as starts
from cusearch_async.run.history import (
    Start,
    changes_since_last_start,
    counts,
    made_otherwise,
    read_starts,
    read_stop,
    record_start,
    record_stop,
)
from cusearch_async.run.identity import DATA, MODEL, NOBODY, SERVED, Identity, not_this_run
from cusearch_async.run.provenance import COMMAND, Computing, weights_of
from tests.fakes import STARTER


@pytest.fixture
def config_of(atlas_config, tmp_path):
    return lambda *overrides: load_config(atlas_config, ["--run.folder", str(tmp_path / "run"), *overrides])


def test_a_start_that_cannot_be_read_is_told_of_once(tmp_path, caplog):
    """`launch` reads them ten times a second while its learner loads."""
    (tmp_path / "starts").mkdir()
    (tmp_path / "starts" / "0001.json").write_text("{}")
    assert read_starts(tmp_path) == read_starts(tmp_path) == []
    assert caplog.text.count("is skipped") == 1


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
    ("key", "value", "message"),
    [
        (
            "method.name",
            "random",
            "method.name: 'sdga_phase' -> 'random', method.mixed_groups_only: False -> not set, method.phase_reserve: "
            "0.5 -> not set",
        ),
        ("run.seed", "1", "run.seed: 0 -> 1"),
        ("learner.lr", "0.5", "learner.lr: 5e-05 -> 0.5"),
        ("data.source", "mine.jsonl", "data.source: ['atlas'] -> ['mine.jsonl']"),
        ("episode.temperature", "0.7", "episode.temperature: 1.0 -> 0.7"),
        ("pool.max_staleness", "1", "pool.max_staleness: 2 -> 1"),
        ("loss.correction", "none", "loss.correction: 'tis' -> 'none'"),
        ("retriever.backend", "dense", "retriever.backend: 'bm25' -> 'dense'"),
        ("loss.dual_clip", "3.0", "loss.dual_clip: not set -> 3.0"),
        ("learner.lora.rank", "8", "learner.lora.rank: 0 -> 8"),
        ("rollout.vllm.quantization", "fp8", "rollout.vllm.quantization: not set -> 'fp8'"),
        ("rollout.vllm.kv_cache_dtype", "fp8", "rollout.vllm.kv_cache_dtype: 'auto' -> 'fp8'"),
        ("rollout.vllm.calculate_kv_scales", "true", "rollout.vllm.calculate_kv_scales: not set -> True"),
        ("rollout.recompute_kv", "false", "rollout.recompute_kv: True -> False"),
    ],
)
def test_what_changes_the_meaning_of_a_run_is_refused_in_one_line_unless_accepted(config_of, key, value, message):
    record_start(config_of(), epoch=1, step=0)
    changed = config_of(f"--{key}", value, "--run.stall_s", "7")
    with pytest.raises(ConfigError) as refused:
        changes_since_last_start(changed, accept=False)
    found = changes_since_last_start(changed, accept=True)
    assert {str(difference) for difference in found} == {*message.split(", "), "run.stall_s: 1800.0 -> 7.0"}
    assert str(refused.value) == str(not_this_run("atlas", [d for d in found if d.key != "run.stall_s"]))


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
def test_what_only_says_how_a_run_works_is_told(config_of, key, value):
    record_start(config_of(), epoch=1, step=0)
    [found] = changes_since_last_start(config_of(f"--{key}", value), accept=False)
    assert found.key == key


def test_an_incomplete_start_is_named_and_the_one_before_is_compared_with(config_of, caplog):
    record_start(config_of(), epoch=1, step=0)
    for name in ("0002.toml", "0002.json"):
        (config_of().folder / "starts" / name).write_text('[run]\nname = "at')
    with pytest.raises(ConfigError, match=r"run\.seed is 3 here and 0 in the run"):
        changes_since_last_start(config_of("--run.seed", "3"), accept=False)
    assert "0002.toml is not a valid config in this version" in caplog.text
    assert "0002.toml cannot be read" in caplog.text
    assert [start.epoch for start in read_starts(config_of().folder)] == [1]


@pytest.mark.parametrize(
    ("key", "text"), [(DATA, "2 (b)"), (MODEL, "385 tokens (c)"), (SERVED, "bm25 over 3 passages (d)")]
)
def test_content_that_changed_under_the_same_name_is_refused_unless_accepted(config_of, key, text):
    """Though all settings are the same. A learner that has not read it yet is not refused for that."""
    before = Identity({DATA: "3 (a)", MODEL: "384 tokens (a)", SERVED: "bm25 over 2 passages (a)"})
    after = Identity({**before.terms, key: text})
    record_start(config_of(), epoch=1, step=0, identity=before)
    for same in (before, NOBODY, Identity({k: v for k, v in before.terms.items() if k != key})):
        assert changes_since_last_start(config_of(), accept=False, identity=same) == []
    with pytest.raises(ContractMismatch, match=re.escape(f"{key} is {text} here and {before.terms[key]} in the run; ")):
        changes_since_last_start(config_of(), accept=False, identity=after)
    found = changes_since_last_start(config_of(), accept=True, identity=after)
    assert found == [(key, text, before.terms[key])]
    record_start(config_of(), epoch=2, step=0, identity=after)
    assert changes_since_last_start(config_of(), accept=False, identity=after) == []


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
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    assert weights_of(str(model)) == ""
    assert f"the weights of {model} cannot be read" in caplog.text


@pytest.mark.parametrize("form", ["model.safetensors", "pytorch_model.bin"])
def test_a_download_that_has_not_ended_is_no_other_model(config_of, tmp_path, monkeypatch, form):
    """Or each later start is refused for what the first one saw of it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    commit = "0" * 40
    model, refs = (tmp_path / "hub" / "models--an--owner" / name for name in (f"snapshots/{commit}", "refs"))
    shutil.copytree(STARTER, model, ignore=shutil.ignore_patterns("*.safetensors"))
    refs.mkdir()
    (refs / "main").write_text(commit)
    first, second = (f"{number}-of-2.{form.partition('.')[2]}" for number in (1, 2))
    (model / f"{form}.index.json").write_text(json.dumps({"weight_map": {"a": first, "b": second}}))
    (model / "other.bin").write_bytes(b"0")
    (model / first).write_bytes(b"1")
    assert weights_of("an/owner") == ""
    (model / second).write_bytes(b"2")
    whole = weights_of("an/owner")
    assert whole.startswith("2 bytes")
    (model / "consolidated.safetensors").write_bytes(b"12")
    assert weights_of("an/owner") == whole


@pytest.mark.parametrize(
    ("done", "epoch", "still"), [(4, 1, True), (5, 1, False), (5, 2, True), (7, 2, False), (9, 3, True)]
)
def test_what_a_later_learner_has_gone_back_behind_does_not_count(done, epoch, still):
    assert counts(done, epoch, [(1, 0), (2, 4), (3, 6)]) is still


def test_a_folder_that_cannot_be_written_is_one_line(config_of):
    config_of().folder.parent.mkdir(exist_ok=True)
    config_of().folder.write_text("a file")
    with pytest.raises(ConfigError, match=r"^run.folder .*/run/starts cannot be written: Not a directory"):
        record_start(config_of(), epoch=1, step=0)


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
    with pytest.raises(ConfigError, match=r"method.name is 'sdga_phase' here and 'gone_module:Method' in .*learner.lr"):
        changes_since_last_start(config_of("--learner.lr", "0.5"), accept=False)


def test_how_a_learner_ended_is_kept_beside_its_start(atlas_config, tmp_path):
    config = load_config(atlas_config, ["--run.folder", str(tmp_path)])
    record_start(config, 1, 0)
    assert read_stop(tmp_path, 1) is None, "it runs, or was killed"
    record_stop(config.folder, 1, 12, "finished")
    assert (read_stop(tmp_path, 1).step, read_stop(tmp_path, 1).outcome) == (12, "finished")
    assert [start.epoch for start in read_starts(tmp_path)] == [1]


def test_a_disk_that_takes_no_ending_is_only_named(atlas_config, tmp_path, caplog):
    config = load_config(atlas_config, ["--run.folder", str(tmp_path)])
    record_start(config, 1, 0)
    (tmp_path / "starts" / "0001.stop").mkdir()
    record_stop(config.folder, 1, None, "NaN")
    assert "0001.stop cannot be written" in caplog.text


CHANGES = [
    ({"versions": {"torch": "2"}}, "package.torch: '1' -> '2'"),
    ({"machine": {"cores": 8}}, "machine.cores: 4 -> 8"),
    ({"computing": Computing(2, 3, "cpu")}, "computing.ranks: 1 -> 2"),
    ({"computing": Computing(1, 4, "cpu")}, "computing.threads: 3 -> 4"),
    ({"computing": Computing(1, 3, "gpu")}, "computing.device: 'cpu' -> 'gpu'"),
    ({"commit": "b"}, "commit: a -> b"),
    ({"contract": {DATA: "y", MODEL: "m"}}, "content of data.source: x -> y"),
    ({"contract": {DATA: "x", MODEL: "n"}}, "content of model.path: m -> n"),
    ({"weights": "other"}, "weights of model.path: some -> other"),
    ({"corpus": "other"}, "content of retriever.corpus: some -> other"),
    ({"epoch": 2, "step": 9, "time": "later", "host": "b", "pid": 2, "argv": ["x"], "launched": ["y"]}, ""),
    ({"nonce": "another", "buffer": "redis://elsewhere:6379/0"}, ""),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_whatever_else_a_start_was_made_with_is_told(change, message):
    made_with = {"versions": {"torch": "1"}, "machine": {"cores": 4}, "computing": Computing(1, 3, "cpu")}
    made_with |= {"contract": {DATA: "x", MODEL: "m"}, "weights": "some", "corpus": "some"}
    made_with |= {"launched": [], "nonce": "n", "buffer": "redis://here:6379/0"}
    start = Start(epoch=1, step=0, time="now", host="a", pid=1, argv=[], commit="a", **made_with)
    assert ", ".join(map(str, made_otherwise(start, structs.replace(start, **change)))) == message
    named = {name for names, _ in CHANGES for name in names}
    assert named == {*Start.__struct_fields__}, "each field of a start counts, or is known not to"


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        (["--loss.kl_coef", "0"], False),
        (["--loss.kl_coef", "0.001"], True),
        (["--loss.kl_coef", "0", "--learner.lora.rank", "4"], True),
        (["--loss.kl_coef", "0", "--learner.trained_layers", "1"], True),
    ],
    ids=["all trained", "reference", "adapter", "upper layers"],
)
def test_other_weights_under_a_checkpoint_that_has_not_all_of_them_are_refused(
    config_of, tmp_path, settings, is_refused
):
    """Before, an adapter continued on another base, and the reference policy was another, without a word."""
    model, identity = tmp_path / "model", Identity({MODEL: "384 tokens (a)"})
    shutil.copytree(STARTER, model)
    config = config_of("--model.path", str(model), *settings)
    record_start(config, epoch=1, step=0, identity=identity)
    assert changes_since_last_start(config, accept=False, identity=identity) == []
    weights = model / "model.safetensors"
    changed = {name: tensor + 1 for name, tensor in load_file(weights).items()}
    save_file(changed, weights, {"format": "pt"})
    if is_refused:
        with pytest.raises(ContractMismatch, match=r"weights of model\.path is \d+ bytes \(\w+\) here and \d+ bytes"):
            changes_since_last_start(config, accept=False, identity=identity)
    assert bool(changes_since_last_start(config, accept=True, identity=identity)) == is_refused
