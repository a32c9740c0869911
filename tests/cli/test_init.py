"""`cusearch init`: the config that it writes is the shipped one with the answers in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cusearch_async.cli import init
from cusearch_async.cli.preflight import speed
from cusearch_async.config import STARTER, load_config, shipped_configs
from cusearch_async.lifecycle.gpus import may_share
from tests.conftest import SLOW

ANSWERS = {"model": "org/model", "data": "my train.jsonl", "passages": "corpus.jsonl", "held_out": "nq"}
NONE = dict.fromkeys(ANSWERS, "")
BASES = [*init.FITTING.values(), init.WITHOUT_GPU]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("answers", [NONE, ANSWERS, ANSWERS | {"passages": "http://10.0.0.5:8000", "held_out": ""}])
def test_what_is_written_is_the_shipped_config_with_the_answers(base, answers):
    shipped = shipped_configs()[base].read_text(encoding="utf-8")
    expected = tomllib.loads(shipped)
    expected["run"]["name"] = "mine"
    if answers["model"]:  # how many of its layers are trained was for the shipped one
        expected["learner"].pop("trained_layers", None)
    for section, key, answer in (
        ("model", "path", answers["model"]),
        ("data", "source", answers["data"] and [answers["data"]]),
        ("eval", "suite", answers["held_out"] and [answers["held_out"]]),
        ("retriever", "url" if "://" in answers["passages"] else "corpus", answers["passages"]),
        ("retriever", "index", answers["passages"] == "corpus.jsonl" and "index-mine"),
    ):
        if answer:
            expected.setdefault(section, {})[key] = answer
    text = init.written(base, "mine", answers, 1)
    assert tomllib.loads(text) == expected
    sections = shipped[shipped.index("[run]") :]
    for comment in (line for line in sections.splitlines() if line.startswith("#") and "layers" not in line):
        assert comment in text, "and its comments"
    assert "second file" not in text, "those at its head are about the shipped one"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", '\n\n[run]\nname = "x"\n'),
        ("[run]\n", '[run]\nname = "x"\n'),
        ('[run]\nname = "a"\nsteps = 3\n\n[model]\n', '[run]\nname = "x"\nsteps = 3\n\n[model]\n'),
        ("[run]\nsteps = 3\n\n[runs]\nname = 1\n", '[run]\nsteps = 3\nname = "x"\n\n[runs]\nname = 1\n'),
        ("[a]\nname = 1\n[run]\nfile_name = 2\n", '[a]\nname = 1\n[run]\nfile_name = 2\nname = "x"\n'),
    ],
)
def test_a_key_is_set_where_it_stands_or_at_the_end_of_its_section(text, expected):
    assert init.with_value(text, "run", "name", "x") == expected


@pytest.mark.parametrize("held_out", ["", "nq"])
@pytest.mark.parametrize("gpus", [2, 3, 8])
@pytest.mark.parametrize("base", init.FITTING.values())
def test_of_several_gpus_each_process_has_one_alone(base, gpus, held_out, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(init.written(base, "mine", NONE | {"held_out": held_out}, gpus), encoding="utf-8")
    config = load_config(path)
    evaluator = [gpus - 2] if held_out and gpus > 2 else []
    workers = gpus - 1 - len(evaluator)
    assert list(config.learner.gpus) == [gpus - 1]
    assert list(config.rollout.gpus) == list(range(workers))
    assert config.rollout.workers == workers
    assert list(config.eval.gpus) == evaluator
    assert config.eval.every == (config.learner.checkpoint_every if evaluator else 0)
    assert not may_share(config), "no engine has a share only"
    assert config.rollout.vllm.kv_cache_memory_bytes is None
    assert "fixed size" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("given", "base"),
    [("8x80", "80gb"), ("2x40", "24gb"), ("8x48", "48gb"), ("1x24", "24gb"), ("4x16", "24gb"), ("8x141", "80gb")],
)
def test_a_config_may_be_for_the_gpus_of_another_machine(tmp_path, cusearch, without_gpu, given, base):
    status, printed = cusearch("init", "mine.toml", "--gpus", given)
    assert (status, f"based on the shipped config one-gpu-{base}" in printed) == (0, True), printed
    config = load_config(tmp_path / "mine.toml")
    assert config.learner.gpus == (int(given[0]) - 1,)
    assert config.run.gpu_gib == float(given[2:]), "check takes the base's for the size of those cards"
    assert "cusearch warmstart" not in printed


@pytest.mark.parametrize("given", ["8", "0x80", "8x0", "8xnan", "axb", "8x80x1"])
def test_gpus_of_another_form_are_refused(tmp_path, cusearch, without_gpu, given):
    assert cusearch("init", "mine.toml", "--gpus", given)[0] == 2
    assert list(tmp_path.iterdir()) == []


def test_what_must_be_done_before_the_run_is_said(cusearch, without_gpu):
    """A model without the tags cannot learn, and the retriever that launch would start has other passages."""
    _, printed = cusearch("init", "mine.toml", "--passages", "http://127.0.0.1:9000")
    assert [line.strip().partition("   ")[0] for line in printed.partition("next:\n")[2].splitlines()] == [
        "start your server at http://127.0.0.1:9000",
        "cusearch check mine.toml",
        "cusearch warmstart mine.toml --demonstrations FILE.jsonl",
        "cusearch launch mine.toml",
    ]
    assert "launch mine.toml   # then with --model.path runs/mine-warmstart/model" in " ".join(printed.split("\n"))


@pytest.fixture
def without_gpu(tmp_path, monkeypatch):
    """In the folder tmp_path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(init, "count_gpus", lambda: 0)
    monkeypatch.setattr(init, "in_fastest_dtype", lambda text, *_: text)


@pytest.fixture
def timed(tmp_path, monkeypatch):
    """Seconds per token by data type; in the folder tmp_path."""
    monkeypatch.chdir(tmp_path)
    seconds = {"float32": 1.8, "bfloat16": 1.0}
    monkeypatch.setattr(speed, "seconds_per_token", lambda config, shape, dtype: seconds[dtype])
    return seconds


@pytest.mark.parametrize("model", [None, str(STARTER)])
@pytest.mark.parametrize(("float32", "written"), [(1.8, "bfloat16"), (1.0, "float32")])
def test_without_gpus_the_data_type_is_the_one_that_is_much_faster_here(
    tmp_path, cusearch, monkeypatch, timed, model, float32, written
):
    """It was the shipped float32 also where `check` then advised bfloat16."""
    monkeypatch.setattr(init, "count_gpus", lambda: 0)
    timed["float32"] = float32
    status, printed = cusearch("init", "mine.toml", *(("--model", model) if model else ()))
    assert status == 0, printed
    assert load_config(tmp_path / "mine.toml").model.dtype == written
    assert f"layers of the model are timed in float32 and bfloat16: {written}\n" in printed
    assert ("as shipped: --model, --data, --passages, --held-out\n" in printed) == (model is None)


def test_a_model_that_is_not_here_keeps_the_shipped_data_type(tmp_path, cusearch, monkeypatch, timed):
    monkeypatch.setattr(init, "count_gpus", lambda: 0)
    status, printed = cusearch("init", "mine.toml", "--model", "org/model")
    assert (status, "timed" in printed) == (0, False)
    assert load_config(tmp_path / "mine.toml").model.dtype == "float32"


def test_a_machine_with_gpus_can_have_a_config_without(tmp_path, cusearch, monkeypatch, timed):
    monkeypatch.setattr(init, "gpus_here", lambda: (2, 80.0))
    assert cusearch("init", "gpus.toml")[0] == 0
    assert load_config(tmp_path / "gpus.toml").learner.gpus == (1,)
    status, printed = cusearch("init", "mine.toml", "--gpus", "0")
    assert (status, "based on the shipped config laptop\n" in printed) == (0, True), printed
    config = load_config(tmp_path / "mine.toml")
    assert (config.learner.gpus, config.run.gpu_gib, config.model.dtype) == ((), None, "bfloat16")


def test_several_files_of_questions_are_a_list_and_an_address_is_no_file(tmp_path, cusearch, without_gpu):
    status, printed = cusearch("init", "mine.toml", "--data", "a.jsonl, b.jsonl", "--passages", "localhost:8000")
    assert status == 0
    assert load_config(tmp_path / "mine.toml").data.source == ("a.jsonl", "b.jsonl")
    assert "--data: b.jsonl does not exist yet" in printed
    assert "--passages: localhost:8000 is taken for a file; the URL of a server begins with http://" in printed
    assert "  cusearch data check a.jsonl b.jsonl --config mine.toml" in printed


@pytest.mark.parametrize(("data", "checked"), [("atlas,t.jsonl", "t.jsonl"), ("atlas-prose", None)])
def test_embedded_questions_are_not_checked_as_files(cusearch, without_gpu, data, checked):
    _, printed = cusearch("init", "mine.toml", "--data", data)
    assert re.findall(r"data check (.*) --config", printed) == ([checked] if checked else [])


def init_in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cusearch_async.cli.main", "init", *words]
    return subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60 * SLOW, check=False
    )


def test_without_a_terminal_the_defaults_count_and_the_config_loads(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = ("--data", "train.jsonl", "--passages", "corpus.jsonl", "--model", "org/model")
    done = init_in(tmp_path, "mine.toml", *words)
    assert done.returncode == 0, done.stderr
    config = load_config(tmp_path / "mine.toml")
    assert config.run.name == "mine"
    assert config.data.source == ("train.jsonl",)
    assert "based on the shipped config laptop" in done.stdout
    assert "as shipped: --held-out\n--data: train.jsonl does not exist yet\n--passages: corpus" in done.stdout
    for command in (
        "data check train.jsonl --config mine.toml",
        "index mine.toml",
        "check mine.toml",
        "launch mine.toml",
    ):
        assert re.search(rf"^  cusearch {re.escape(command)}(   # .*)?$", done.stdout, re.MULTILINE)
    again = init_in(tmp_path, "mine.toml")
    assert (again.returncode, again.stderr) == (1, "cusearch: mine.toml exists; edit it, or name another\n")


@pytest.mark.parametrize(
    ("there", "usable", "learner", "rollout"),
    [
        ({0, 1}, 2, [1], [0]),
        (set(range(8)), 8, [4, 5, 6, 7], [0, 1, 2, 3]),
        (set(range(8)), 2, [], []),
        ({0}, 1, [], []),
    ],
)
def test_a_run_without_gpus_has_all_cores_of_the_machine(
    tmp_path, cusearch, without_gpu, monkeypatch, there, usable, learner, rollout
):
    """It had two of any number; in a container with a share of many, those of its neighbours."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: there)
    monkeypatch.setattr("cusearch_async.cli.init.usable_cores", lambda: usable)
    assert cusearch("init", "mine.toml")[0] == 0
    config = load_config(Path("mine.toml"))
    assert (list(config.learner.cores), list(config.rollout.cores)) == (learner, rollout)


def test_of_several_held_out_files_those_that_are_not_there_are_named(tmp_path, monkeypatch):
    """All were said not to exist."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").touch()
    answers = dict.fromkeys(("data", "passages", "model"), "atlas")
    assert list(init._remarks(answers | {"held_out": "a.jsonl, ./a.jsonl,nq"})) == []
    (said,) = init._remarks(answers | {"held_out": "a.jsonl, b.jsonl"})
    assert said == "--held-out: b.jsonl does not exist yet"


@pytest.mark.parametrize("option", ["model", "data", "held_out"])
def test_only_passages_may_be_of_a_server(option):
    """It was advised for all, with --held_out, which is no option."""
    assert list(init._remarks(dict.fromkeys(ANSWERS, "atlas") | {option: "here:8000"})) == []


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["mine"], "name a .toml file by the name of the run, like mine.toml, got mine"),
        (["a b.toml"], "name a .toml file by the name of the run, like mine.toml, got a b.toml"),
        (["mine.toml", "--passages", "ftp://somewhere/x"], "retriever.url"),
        (["mine.toml", "--model", "a\x7fb"], "an answer holds what cannot be written"),
        (["mine.toml", "--data", "a.jsonl,,b.jsonl"], "must be a list"),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_no_file(tmp_path, cusearch, without_gpu, words, why):
    status, _ = cusearch("init", *words)
    assert why in str(status)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_made_for_it_and_paths_at_home_are_found_by_what_is_printed(
    tmp_path, cusearch, without_gpu, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ("deep/mine.toml", "--data", "~/t.jsonl", "--passages", "atlas", "--held-out", "nq,bamboogle")
    status, printed = cusearch("init", *words)
    assert status == 0
    assert f"  cusearch data check {tmp_path}/t.jsonl --config deep/mine.toml\n" in printed
    assert "cusearch index" not in printed
    config = load_config(tmp_path / "deep" / "mine.toml")
    assert config.eval.suite == ("nq", "bamboogle")
    assert (config.retriever.corpus, config.retriever.index) == ("atlas", None)


def test_in_a_terminal_it_asks_for_what_is_not_given(tmp_path, monkeypatch):
    asked = []

    def answer(question: str) -> str:
        asked.append(question)
        return " my/model " if question.startswith("model") else ""

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr(init.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(init, "count_gpus", lambda: 0)
    parser = init.argparse.ArgumentParser()
    init.add(parser)
    init.run(parser.parse_args([str(tmp_path / "mine.toml"), "--data", "atlas"]), [])
    assert [question.partition(",")[0] for question in asked] == ["model", "passages", "held-out questions"]
    assert load_config(tmp_path / "mine.toml").model.path == "my/model"
