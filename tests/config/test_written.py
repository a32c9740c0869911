"""What people write into a config and on the command line is understood by one rule each, or refused with the cause."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from cusearch_async.config import load_config
from cusearch_async.errors import ConfigError
from tests.config.lines import error_of, pattern_of


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b'\xef\xbb\xbf[run]\r\nname = "r"\r\n[learner]\r\nlr = 1e-5\r\n')
    assert load_config(path).learner.lr == 1e-5


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("[run]\nname = “r”", '“ is a typographic quote; write "'),
        ("[run]\nname = ‘r’", '‘ is a typographic quote; write "'),
        ("[run]\nname = r", 'text needs quotes: "r"'),
        ("[run]\nfolder = ~/runs # mine", 'text needs quotes: "~/runs"'),
        ("[learner]\npacking = True", "for True write true"),
        ("[learner]\npacking = False  # off", "for False write false"),
        ("[run]\nfolder = None", "for None leave the key out"),
        ('[run]\nname\u00a0= "r"', "the line contains '\\xa0', an invisible character; remove it"),
        ('{"run": {"name": "r"}}', "it looks like JSON; in TOML it is [run]"),
        ("run:\n  name: r", "it looks like YAML; in TOML it is key = value"),
    ],
)
def test_what_is_not_toml_is_refused_with_its_cause(write, text, cause):
    path = write(run=text)
    said = error_of(path)
    assert said.startswith(f"config file {path} is not valid TOML: ")
    assert f"; {cause}" in said
    assert "\n" not in said


@pytest.mark.parametrize("text", ["[run", "x =", '[run]\nname = "r', "[run]\n[run]\n", ""])
def test_where_no_cause_can_be_seen_none_is_said(write, text):
    assert "; " not in error_of(write(run=text)).partition("every config")[0].replace("is missing; ", "")


LISTS = {
    "learner.gpus": (("0,1", (0, 1)), ("[0, 1]", (0, 1)), ("1", (1,)), ("0, 1 ", (0, 1)), ("", ()), ("[]", ())),
    "rollout.cores": (("2,3", (2, 3)),),
    "eval.suite": (("nq,hotpotqa", ("nq", "hotpotqa")), ('["nq"]', ("nq",)), ("nq", ("nq",)), ('["a,b"]', ("a,b",))),
    "run.tags": (("1e3", ("1e3",)), ("0.10, 2024-01-01", ("0.10", "2024-01-01")), ('["a", "b"]', ("a", "b"))),
    "data.source": (("a.jsonl, b.jsonl", ("a.jsonl", "b.jsonl")),),
    "learner.lora.targets": (("q_proj,k_proj", ("q_proj", "k_proj")),),
}


@pytest.mark.parametrize(("key", "text", "value"), [(key, *case) for key, cases in LISTS.items() for case in cases])
def test_every_list_setting_takes_commas_or_toml(write, key, text, value):
    found = load_config(write(), [f"--{key}", text])
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False), ("False", False)])
def test_a_setting_with_three_states_takes_true_and_false(write, text, value):
    assert load_config(
        write(), ["--rollout.vllm.enable_chunked_prefill", text]
    ).rollout.vllm.enable_chunked_prefill is (value)


def test_an_argument_that_is_no_utf_8_is_refused(write):
    with pytest.raises(ConfigError, match=r"--run.note 'caf.udce9' is not UTF-8"):
        load_config(write(), ["--run.note", os.fsdecode("café".encode("latin-1"))])


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        (
            "eval.suite",
            '["nq"',
            r"--eval.suite '[\"nq\"' is no whole value .*; write a list as a,b or as '[\"a\", \"b\"]'",
        ),
        ("eval.suite", "[nq,hotpotqa]", "--eval.suite '[nq,hotpotqa]' is no whole value .*"),
        ("eval.suite", 'nq"]', 'eval.suite: must be a list, like ["a", "b"] or a,b, got \'nq"]\''),
        ("data.source", "a.jsonl,,b.jsonl", "data.source: must be a list, like .*got 'a.jsonl,,b.jsonl'"),
        ("learner.gpus", "0;1", "learner.gpus: .*integer.*, got '0;1'"),
        ("learner.gpus", "[0, 1", "--learner.gpus '[0, 1' is no whole value .*"),
        ("learner.cores", "0-3", "learner.cores: must be a list of integers, like [0, 1] or 0,1, got '0-3'"),
        ("model.path", '"half', "--model.path '\"half' is no whole value .*"),
        ("pool.questions", "True", "pool.questions: must not be true or false, got true"),
    ],
)
def test_half_a_list_is_refused(write, key, text, said):
    found = error_of(write(), f"--{key}", text)
    assert re.match(pattern_of(said.replace('\\"', '"')), found), found


PATHS = ("run.folder", "weights.folder", "retriever.corpus", "model.path", "data.source", "eval.suite", "eval.folder")
PATHS += ("retriever.web.cache", "retriever.dense.encoder", "retriever.rerank.model", "environment.search.source")


@pytest.mark.parametrize("key", PATHS)
def test_every_path_setting_has_the_users_home_for_a_tilde_and_refuses_variables(write, key, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    found = load_config(write(), [f"--{key}", "~/x/y"])
    for name in key.split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    assert found in (Path("/home/me/x/y"), "/home/me/x/y", ("/home/me/x/y",))
    for variable in ("$HOME", "${SCRATCH}"):
        assert f"holds {variable}, which only a shell replaces" in error_of(write(), f"--{key}", f"{variable}/x")
    assert "there is no such user" in error_of(write(), f"--{key}", "~nobody-here/x")


@pytest.mark.parametrize(
    ("key", "given", "kept"),
    [
        ("retriever.url", "http://h:8000/", "http://h:8000"),
        ("retriever.url", "http://h:8000/retrieve", "http://h:8000"),
        ("retriever.url", "http://h:8000/retrieve/", "http://h:8000"),
        ("retriever.url", "http://h:8000/a/retrieve", "http://h:8000/a"),
        ("retriever.zerosearch.url", "http://h/v1/", "http://h/v1"),
        ("retriever.zerosearch.url", "http://h/v1/chat/completions", "http://h/v1"),
        ("eval.judge.url", "http://h/v1/chat/completions", "http://h/v1"),
        ("weights.url", "http://10.0.0.5:29400/", "http://10.0.0.5:29400"),
    ],
)
def test_a_service_is_asked_at_its_base_whatever_endpoint_was_copied(write, key, given, kept):
    transport = ["--weights.transport", "http"] if key == "weights.url" else []
    found = load_config(write(), [f"--{key}", given, *transport])
    for name in key.split("."):
        found = getattr(found, name)
    assert found == kept


@pytest.mark.parametrize("text", ['name = "search"', 'name = "search"\nshare = 2', "share = 2"])
def test_an_environment_without_a_label_is_told_where_the_label_goes(write, text):
    said = error_of(write(f"[environment]\n{text}\n"))
    assert "write [environment.search] above it, not [environment]" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Atlas", "atlas"),
        ("atlas.tml", "atlas"),
        ("atals", "atlas"),
        ("paper/methods/sdga-phase", "paper/methods/sdga_phase"),
        ("mine.tml", "mine.toml"),
        ("mine", "mine.toml"),
    ],
)
def test_a_config_that_does_not_exist_is_answered_with_the_one_that_is_meant(tmp_path, monkeypatch, name, meant):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").touch()
    assert error_of(Path(name)).startswith(f"config file {name} does not exist; did you mean {meant}? give a TOML file")


def test_a_config_that_is_like_none_has_no_such_answer(tmp_path):
    assert "did you mean" not in error_of(tmp_path / "quite_another.toml")


def test_a_study_is_told_from_a_config(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text('[study]\nname = "s"\n[[part]]\nname = "p"\n', encoding="utf-8")
    assert error_of(path) == (f"{path} is a study, not the config of a run; make its runs with `cusearch study {path}`")
