"""Where a config comes from: files over files, overrides, and custom methods and environments."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cusearch_async.config import as_toml, load_config, of_toml, overrides_of, save_config
from cusearch_async.config.reading import _pairs
from cusearch_async.errors import ConfigError
from cusearch_async.lifecycle.entry import split_overrides
from cusearch_async.run.folder import mark
from tests.config.lines import error_of, pattern_of, write_all

CONFIGS = Path(__file__).parents[2] / "configs"


# Files that cannot be read.


def test_a_file_that_does_not_exist_is_named(tmp_path):
    assert error_of(tmp_path / "no.toml").startswith(f"config file {tmp_path / 'no.toml'} does not exist; give a TOML")


@pytest.mark.parametrize("name", ["atlas", "paper/base", "paper/methods/dapo"])
def test_a_shipped_config_is_found_by_its_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "atlas").mkdir()
    assert load_config(Path(name)) == load_config(CONFIGS / f"{name}.toml")


def test_a_file_of_a_shipped_configs_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "atlas").write_text('[run]\nname = "mine"\n', encoding="utf-8")
    assert load_config(Path("atlas")).run.name == "mine"


@pytest.mark.parametrize("name", ["", "run.toml"])
def test_a_folder_and_a_file_that_is_not_text_are_no_config(tmp_path, name):
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe\x00")
    wrong = "cannot be read: " if name else "is a folder; give a .toml file in it"
    assert error_of(tmp_path / name).startswith(f"config file {tmp_path / name} {wrong}")


# Files over files.


def test_a_later_file_is_laid_over_earlier_ones_key_by_key(tmp_path):
    first = '[run]\nname = "a"\nsteps = 3\n[learner]\ncores = [0, 1]\n[retriever.dense]\nbatch = 7\n'
    second = 'run.name = "b"\n[learner]\ncores = [2]\n[retriever.dense]\nencoder = "e"\n'
    config = load_config(write_all(tmp_path, first, second), ["--run.seed", "4"])
    assert (config.run.name, config.run.steps, config.run.seed) == ("b", 3, 4)
    assert config.learner.cores == (2,), "a list is replaced"
    assert (config.retriever.dense.batch, config.retriever.dense.encoder) == (7, "e")


def test_an_environment_of_a_later_file_comes_beside_those_of_earlier_ones(tmp_path):
    first = '[run]\nname = "a"\n[environment.search]\nshare = 2\n'
    second = '[environment.more]\nformat_weight = 0.5\n[environment.search]\ntemplate = "atlas"\n'
    config = load_config(write_all(tmp_path, first, second))
    assert list(config.environment) == ["search", "more"]
    assert (config.environment["search"].share, config.environment["search"].template) == (2, "atlas")
    assert config.environment["more"].own.format_weight == 0.5


def test_a_value_of_a_later_file_replaces_a_section_and_is_then_refused(tmp_path):
    paths = write_all(tmp_path, '[run]\nname = "a"\n[learner]\nlr = 1e-6\n', "learner = 3\n")
    with pytest.raises(ConfigError, match=r"learner: .*got 3"):
        load_config(paths)


# Custom methods and environments.


OWN = """
from cusearch_async.algorithm.methods.baselines import GrpoFull
from cusearch_async.algorithm.methods import MethodSettings
from pydantic import Field
from typing import Any
from cusearch_async.environments.search import SearchEnvironment, SearchSettings


class Knobs(MethodSettings):
    phase_reserve: float = 0.25
    knob: int = 3
    step: float | None = 0.5
    table: dict[str, Any] = {}


class Mine(GrpoFull):
    Settings = Knobs


class Strict(SearchSettings):
    format_weight: float = 0.5
    patience: int = 2
    code: str = Field("a", pattern="^[ab]$")


class World(SearchEnvironment):
    Settings = Strict
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_things.py").write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_things", None)


OWN_NAMES = '[method]\nname = "own_things:Mine"\nbudget = 192\n[environment.w]\nname = "own_things:World"\n'


@pytest.mark.usefixtures("own_module")
def test_defaults_of_custom_settings_win_over_those_of_the_same_name_and_survive_a_file(write, tmp_path):
    config = load_config(write(OWN_NAMES))
    save_config(config, tmp_path / "saved.toml")
    for read in (config, load_config(tmp_path / "saved.toml")):
        assert (read.method.own.phase_reserve, read.method.own.knob) == (0.25, 3)
        assert (read.environment["w"].own.format_weight, read.environment["w"].own.patience) == (0.5, 2)


@pytest.mark.usefixtures("own_module")
def test_an_own_setting_that_is_switched_off_stays_off_in_a_saved_config(write):
    """Processes that launch started had its default."""
    config = load_config(write(OWN_NAMES), ["--method.step", "none"])
    again = of_toml(as_toml(config))
    assert (config.method.own.step, again.method.own.step) == (None, None)
    assert again.method.own == config.method.own


@pytest.mark.parametrize(
    "key", ["retriever.options.limit", "rollout.vllm.limit", "learner.deepspeed.zero_optimization.limit"]
)
def test_infinity_in_a_table_of_others_options_survives_a_file(write, key):
    """It could not be written."""
    config = load_config(write(""), [f"--{key}", "inf"])
    assert of_toml(as_toml(config)) == config
    assert "limit = inf" in as_toml(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model.chat_template.x = [1]",
            "model.chat_template: chat_template.x must be a text, .* true or false, got [1]",
        ),
        (
            "eval = {every = 10, gpus = [7]}\nrollout.vllm.tensor_parallel_size = 2",
            "eval.gpus [7] must name at least 2: rollout.vllm.tensor_parallel_size",
        ),
        ("eval = {every = 10, gpus = [6, 6]}", "eval.gpus [6, 6] names a GPU twice"),
        ("retriever.options.t = [2024-01-01]", "retriever.options: must not hold a date or a time, got 2024-01-01; .*"),
    ],
)
def test_what_a_run_could_not_use_is_named(write, text, message):
    assert re.fullmatch(pattern_of(message), error_of(write(text)))


@pytest.mark.usefixtures("own_module")
def test_infinity_and_dates_in_an_own_table_are_as_in_others(write):
    config = load_config(write(OWN_NAMES), ["--method.table.limit", "inf"])
    assert of_toml(as_toml(config)).method.own.table == {"limit": math.inf}
    with pytest.raises(ConfigError, match=r"^method: must not hold a date or a time, got 2024-01-01"):
        load_config(write(OWN_NAMES), ["--method.table.d", "2024-01-01"])


def test_the_saved_configs_of_one_run_may_be_given_together_for_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(Path("atlas"), ["--run.folder", "demo"])
    mark(config.folder, config.run.name)
    for name in ("config.toml", "launch.toml"):
        save_config(config, config.folder / name)
    monkeypatch.chdir(config.folder)
    for names in (["config.toml", "launch.toml"], ["config.toml"] * 2):
        assert load_config([Path(name) for name in names], ["--run.name", "x"]).folder == Path("runs/x")


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[method]\nknob = 1.5", "method.knob: input should be a valid integer.*, got 1.5"),
        ("[method]\nknop = 1", "method.knop: unknown key.*"),
        ("[environment.w]\npatience = 'long'", "environment.w.patience: .*integer.*, got 'long'"),
        ("[environment.w]\nformat_weight = 2", "environment.w.format_weight: .*, got 2"),
        ("[environment.w]\npatiens = 2", "environment.w.patiens: unknown key.*"),
        ("[method]\nknob = true", "method.knob: must not be true or false, got true"),
        ("[environment.w]\ncode = 'xyz'", "environment.w.code: must match ^[ab]$, got 'xyz'"),
    ],
)
def test_a_wrong_custom_setting_is_named_in_one_line(tmp_path, text, message):
    found = error_of(write_all(tmp_path, '[run]\nname = "r"\n' + OWN_NAMES, text))
    assert re.fullmatch(pattern_of(message), found)


TAKEN = """
from cusearch_async.environments import EnvironmentSettings, SearchEnvironment
class Own(EnvironmentSettings):
    {}
class Thing(SearchEnvironment):
    Settings = Own
"""
BROKEN = {
    "exits": ("raise SystemExit(0)", "module 'broken_exits' .* cannot be imported (SystemExit: 0)"),
    "raises": ("raise AttributeError('deep')", "module 'broken_raises' .* cannot be imported (AttributeError: deep"),
    "syntax": ("def (", "module 'broken_syntax' of .* cannot be imported (SyntaxError"),
    "nothing": ("", "module 'broken_nothing' has no 'Thing'; the module is .*/broken_nothing.py"),
    "shared": (
        TAKEN.format("share: float = 0.25"),
        "environment.w: Own must not have a setting 'share': the config uses",
    ),
    "member": (
        TAKEN.format("prompt: str = 'x'"),
        "environment.w: Own must not have a setting 'prompt': the config uses",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_wrong_with_a_custom_module_is_named(write, tmp_path, monkeypatch, case):
    source, message = BROKEN[case]
    (tmp_path / f"broken_{case}.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    said = error_of(write(f'[environment.w]\nname = "broken_{case}:Thing"\n'))
    assert re.match(".*" + pattern_of(message), said)


def test_a_saved_config_holds_its_template_and_needs_no_file(write, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Ask {question}", encoding="utf-8")
    config = load_config(write(f'[environment.search]\ntemplate = "{prompt}"\n'))
    save_config(config, tmp_path / "saved.toml")
    prompt.unlink()
    assert load_config(tmp_path / "saved.toml") == config
    assert config.environment["search"].prompt.text == "Ask {question}"


def test_an_override_may_name_a_label_with_a_dash(write):
    config = load_config(write("[environment.my-own]\n"), ["--environment.my-own.share", "3"])
    assert config.environment["my-own"].share == 3
    assert split_overrides(["--environment.my-own.share", "3"]) == ([], ["--environment.my-own.share", "3"])


@pytest.mark.parametrize("name", ["random", "sdga_phase"])
def test_a_saved_config_holds_the_settings_of_its_method_alone(write, name):
    saved = load_config(write(f'[method]\nname = "{name}"\n')).model_dump()["method"]
    assert ("phase_reserve" in saved) == (name == "sdga_phase")


# Overrides.


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["--learner.lr", "1e-5"], ("learner", "lr"), 1e-5),
        (["--learner.lr=1e-5"], ("learner", "lr"), 1e-5),
        (["--learner.lr", "1e-5", "--learner.lr=2e-5"], ("learner", "lr"), 2e-5),
        (["--steps", "7"], ("run", "steps"), 7),
        (["--steps=7"], ("run", "steps"), 7),
        (["--run.steps", "7"], ("run", "steps"), 7),
        (["--learner.cores", "[0, 1]"], ("learner", "cores"), (0, 1)),
        (["--rollout.max_episodes", "200"], ("rollout", "max_episodes"), 200),
        (["--model.path", "Qwen/Qwen2.5-3B"], ("model", "path"), "Qwen/Qwen2.5-3B"),
        (["--model.path", '"quoted"'], ("model", "path"), "quoted"),
        (["--data.source=a={text}"], ("data", "source"), ("a={text}",)),
        (["--run.name", "a-b"], ("run", "name"), "a-b"),
        *((["--run.name", name], ("run", "name"), name) for name in ("7834e10", "0x10", "10.50", "1_0", "2024-05-01")),
        (["--run.note", "3 # of them"], ("run", "note"), "3 # of them"),
        (["--run.note", "{title}: True"], ("run", "note"), "{title}: True"),
        (["--run.folder", "2024"], ("run", "folder"), Path("2024")),
        (["--loss.correction_high", "2"], ("loss", "correction_high"), 2.0),
    ],
)
def test_an_override_replaces_the_files_value(write, overrides, key, value):
    section, field = key
    assert getattr(getattr(load_config(write("[learner]\nlr = 3e-6\n"), overrides), section), field) == value


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--learner.lr"], "--learner.lr needs a value: --learner.lr VALUE"),
        (["--learner.lr", "--steps", "3"], "--learner.lr needs a value: --learner.lr VALUE"),
        (["learner.lr", "1"], "'learner.lr' is not a setting; write --section.key value"),
        (["--", "1"], "'--' is not a setting; write --section.key value"),
        (["--run.name.first", "x"], "--run.name.first: name is a value, not a section"),
        (["--learner.lr", "fast"], "learner.lr: .*, got 'fast'"),
        (["--loss.minibach", "16"], "loss.minibach: unknown key; did you mean loss.minibatch?"),
        (["--method.budget", "100"], "method.budget (K = 100) must be a multiple of loss.minibatch (M = 32)"),
    ],
)
def test_a_wrong_override_is_said_in_one_line(write, overrides, message):
    assert re.fullmatch(pattern_of(message), error_of(write(), *overrides))


@pytest.mark.parametrize(
    ("arguments", "own", "overrides"),
    [
        ([], [], []),
        (["launch", "a.toml"], ["launch", "a.toml"], []),
        (["launch", "a.toml", "--steps", "3"], ["launch", "a.toml"], ["--steps", "3"]),
        (["launch", "--learner.lr", "1e-6", "a.toml"], ["launch", "a.toml"], ["--learner.lr", "1e-6"]),
        (["launch", "--learner.lr=1e-6", "a.toml"], ["launch", "a.toml"], ["--learner.lr=1e-6"]),
        (["--fresh", "--run.name", "x", "--help"], ["--fresh", "--help"], ["--run.name", "x"]),
        (["--steps", "--fresh"], ["--fresh"], ["--steps"]),
        (["--stepsize", "3"], ["--stepsize", "3"], []),
        (["a", "--learner.lr"], ["a"], ["--learner.lr"]),
        (["--retriever.url", "-1"], [], ["--retriever.url", "-1"]),
    ],
)
def test_overrides_are_told_from_a_commands_own_arguments(arguments, own, overrides):
    assert split_overrides(arguments) == (own, overrides)


@given(st.lists(st.sampled_from(["--steps", "--a.b", "--a.b=1", "--fresh", "x", "--x=1", "3"]), max_size=8))
def test_no_argument_is_lost_in_the_split(arguments):
    own, overrides = split_overrides(arguments)
    assert sorted(own + overrides) == sorted(arguments)


TEXT = st.characters(exclude_categories=["Cs"], exclude_characters="\x7f")  # that one has another escape in TOML


@given(st.sampled_from(["method.kind", "run.note", "model.path"]), st.text(TEXT))
@example("method.kind", "2024")
@example("method.kind", "true")
@example("method.kind", "2024-01-01")
@example("method.kind", "[x")
@example("run.note", "--x")
def test_a_text_is_a_text_again_behind_an_override(key, text):
    """A study's text came back as a number, a date or half a list where the setting was of a method of the user's."""
    assert list(_pairs(overrides_of({key: text}))) == [(key, text)]


@pytest.mark.parametrize("value", [True, 3, 1e-6, ["a", "b"], [1, 2]])
def test_a_value_is_the_same_behind_an_override(value):
    assert list(_pairs(overrides_of({"method.kind": value}))) == [("method.kind", value)]


# Files that a run has saved.


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """The launch.toml of the run runs/mine below the test's folder; the current folder is another."""
    home, elsewhere = tmp_path / "runs" / "mine", tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    config = load_config([], ["--run.name", "mine"])
    mark(config.folder, config.run.name)
    save_config(config, home / "launch.toml")
    monkeypatch.chdir(elsewhere)
    return home / "launch.toml"


def test_a_saved_config_means_the_folder_that_it_lies_in(saved, tmp_path):
    """From another folder it began a new run there, also by the command that the page shows to continue."""
    assert load_config(saved).folder == saved.parent
    assert load_config(saved, ["--learner.lr", "1e-6"]).folder == saved.parent
    moved = tmp_path / "moved"
    saved.parent.rename(moved)
    assert load_config(moved / "launch.toml").folder == moved


def test_a_saved_config_may_come_last_and_be_corrected(saved, tmp_path):
    first = tmp_path / "first.toml"
    first.write_text("[learner]\nlr = 1e-3\n")
    assert load_config([first, saved]).folder == saved.parent
    saved.write_text(re.sub(r"\nlr = .*", "\nlr = -1.0", saved.read_text()))
    assert load_config(saved, ["--learner.lr", "1e-6"]).folder == saved.parent


def test_another_name_or_folder_than_the_saved_one_counts(saved, tmp_path):
    assert load_config(saved, ["--run.folder", "runs/mine"]).folder == Path("runs/mine")
    assert load_config(saved, ["--run.name", "other"]).folder == Path("runs/other")
    assert load_config(saved, ["--run.folder", "here"]).folder == Path("here")
    copied = tmp_path / "mine.toml"
    copied.write_bytes(saved.read_bytes())
    assert load_config(copied).folder == Path("runs/mine"), "no run has saved it there"


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("rollout.vllm.lora_target_modules", '["q_proj"]', "use learner.lora.targets"),
        ("rollout.vllm.hf_token", "hf_secret", "set HF_TOKEN in the environment"),
    ],
)
def test_an_option_of_vllm_that_would_part_engine_and_learner_or_is_a_secret_is_refused(write, option, value, said):
    error = error_of(write(), f"--{option}", value)
    assert said in error
    assert "secret" not in error
