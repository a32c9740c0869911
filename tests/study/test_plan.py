"""A study file becomes runs, each once, or a line that says what is wrong with it."""

from __future__ import annotations

from collections import Counter

import pytest

from cusearch_async.config import Config, load_config
from cusearch_async.errors import ConfigError
from cusearch_async.study.plan import has, read_plan
from tests.study.studies import plan_of


def test_a_grid_is_every_combination_with_every_seed(tmp_path):
    plan = plan_of(tmp_path)
    of_methods = [run for run in plan.runs.values() if "methods" in run.parts]
    assert Counter((r.config.method.name, r.config.retriever.stochastic) for r in of_methods) == {
        (method, stochastic): 3 for method in ("grpo_full", "sdga_phase") for stochastic in (True, False)
    }
    assert {run.config.run.seed for run in of_methods} == {0, 1, 2}
    assert all(run.config.run.steps == 4 for run in of_methods)


def test_a_run_that_two_parts_ask_for_is_made_once(tmp_path):
    plan = plan_of(tmp_path)
    shared = [run for run in plan.runs.values() if len(run.parts) == 2]
    assert len(plan.runs) == 12 + 2
    assert [(r.config.pool.max_staleness, r.seed) for r in shared] == [(2, 0), (2, 1)]
    assert all(run.parts == ["methods", "staleness"] and run.config.method.name == "sdga_phase" for run in shared)


def test_a_run_of_two_parts_has_its_settings_as_either_writes_them(tmp_path):
    """Before, only the first one's counted: the second lacked its baseline, or seeds in its claims."""
    grid = '"method.name" = ["grpo_full", "sdga_phase"]'
    same = '[part.settings]\n"learner.lr" = 2e-5\n[part.grid]\n"method.name" = ["sdga_phase"]'
    plan = plan_of(
        tmp_path,
        (grid, f'{grid}\n"learner.lr" = ["2e-5", "1e-5"]'),
        ('[part.grid]\n"method.name" = ["sdga_phase"]', same),
    )
    shared = [run for run in plan.runs.values() if len(run.parts) == 2]
    assert shared
    for run in shared:
        assert has(run, {"learner.lr": "2e-5"})
        assert has(run, {"learner.lr": 2e-5})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.folder", "/tmp/x"),
        ("redis.url", "redis://127.0.0.1:7000/0"),
        ("retriever.url", "http://127.0.0.1:7001"),
        ("weights.folder", "/dev/shm/x"),
        ("learner.checkpoint_objects", "s3://bucket/x"),
    ],
)
def test_where_runs_keep_their_files_makes_them_no_others(tmp_path, key, value):
    """A section of nothing else stayed, empty, and all runs that were done were made again."""
    (tmp_path / "places.toml").write_text(f'{key} = "{value}"\n')
    configs = ('configs = ["atlas"]', f'configs = ["atlas", "{tmp_path}/places.toml"]')
    assert [*plan_of(tmp_path, configs).runs] == [*plan_of(tmp_path).runs]


def test_training_data_may_differ_where_the_held_out_questions_are_a_suite(tmp_path):
    """Before, they were said to be scored on others."""
    for name in ("a", "b", "suite"):
        (tmp_path / f"{name}.jsonl").write_text("")
    one, other = f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"
    grid = '"retriever.stochastic" = [true, false]', f'"data.source" = [["{one}"], ["{other}"]]'
    against = '"method.name" = "grpo_full" }', f'"data.source" = ["{one}"] }}'
    with pytest.raises(ConfigError, match="scored on other held-out questions"):
        plan_of(tmp_path, grid, against)
    plan_of(tmp_path, grid, against, ('"run.steps" = 4', f'"run.steps" = 4\n"eval.suite" = ["{tmp_path}/suite.jsonl"]'))


def test_the_seeds_of_a_combination_alternate_with_other_combinations(tmp_path):
    """Whatever is not finished lacks the last seeds, and no method."""
    seeds = [run.seed for run in plan_of(tmp_path).runs.values() if "methods" in run.parts]
    assert seeds == sorted(seeds)


def test_the_arguments_of_a_run_give_its_config(tmp_path):
    for run in plan_of(tmp_path).runs.values():
        assert load_config([*plan_of(tmp_path).study.configs], run.arguments()) == run.config


def test_an_id_is_readable_and_depends_on_every_setting(tmp_path):
    first, other = plan_of(tmp_path), plan_of(tmp_path, ('"run.steps" = 4', '"run.steps" = 8'))
    assert not first.runs.keys() & other.runs.keys()
    assert next(iter(first.runs)).startswith("grpo_full-s0-")
    assert plan_of(tmp_path).runs.keys() == first.runs.keys()


def test_a_new_part_makes_no_run_another_one(tmp_path):
    more = (
        '[[part]]\nname = "noise"\nseeds = 1\n[part.grid]\n"retriever.noise" = [0.25]\n\n[[part]]\nname = "staleness"'
    )
    assert plan_of(tmp_path).runs.keys() < plan_of(tmp_path, ('[[part]]\nname = "staleness"', more)).runs.keys()


def test_a_new_setting_of_the_program_makes_no_run_another_one(tmp_path, monkeypatch):
    """What is a default counts for nothing: as if all configs had one more."""
    before = plan_of(tmp_path).runs.keys()
    dump = Config.model_dump

    def with_one_more(config, **options):
        new = {} if options.get("exclude_defaults") else {"new": 1}
        return dump(config, **options) | new

    monkeypatch.setattr(Config, "model_dump", with_one_more)
    assert plan_of(tmp_path).runs.keys() == before


@pytest.mark.parametrize("value", ["2", "2.0"])
def test_a_baseline_is_compared_by_value(tmp_path, value):
    plan = plan_of(tmp_path, ('{ "pool.max_staleness" = 2 }', f'{{ "pool.max_staleness" = {value} }}'))
    baseline = plan.baseline(plan.parts[1])
    assert [has(run, baseline) for run in plan.of("staleness")].count(True) == 2


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"sdga_phase"]\n"retriever', '"sdga_faze"]\n"retriever', r"part 'methods', with .*method.name = sdga_faze"),
        ('"run.steps" = 4', '"run.steps" = 5', r"run.steps \(5\) must be a multiple of eval.every \(2\)"),
        ('"eval.in_order" = true', '"eval.in_order" = false', "a study needs eval.in_order = true"),
        ('"run.steps" = 4', '"run.steps" = 4\n"run.seed" = 3', "run.seed is set by the study itself"),
        ("seeds = 3", "seeds = 0", r"^part 'methods': seeds: .* equal to 1, got 0$"),
        ("seeds = 3", "seed = 3", r"^part 'methods': seed: unknown key; did you mean seeds\?$"),
        ("seeds = 3", "", r"^part 'methods': seeds: is missing; it is the number of runs of each combination"),
        ("[study]", "[studdy]", r"^studdy: unknown key; did you mean study\?$"),
        ('configs = ["atlas"]', "configs = []", r"^study: configs: must have at least 1 item, got \[\]$"),
        ('configs = ["atlas"]', 'configs = ["atlas"]\nprimary = []', "^study: primary: must have at least 1 item"),
        ('configs = ["atlas"]', 'configs = ["atlsa"]', r"config file atlsa does not exist; did you mean atlas\?"),
        ('baseline = { "method.name" = "grpo_full" }', "", r"^study: baseline: is missing; .*like \{ \"method.name\""),
        ('{ "method.name" = "grpo_full" }', '"grpo_full"', r"^study: baseline: must be settings, .*got 'grpo_full'$"),
        ('{ "method.name" =', '{ "methd.name" =', r"^methd.name: unknown key; did you mean method.name\?$"),
        ('"method.name" = ["grpo_full"', '"methd.name" = ["grpo_full"', r"methd: unknown key; did you mean method\?$"),
        (
            '"pool.max_staleness" = [0, 2]',
            '"pool.max_staleness" = 2',
            r"grid: pool.max_staleness: must be a list, .*2$",
        ),
        ('name = "staleness"', 'name = "methods"', "parts must have different names"),
        ('= "grpo_full" }', '= "grpo_full", "learner.lr" = 1 }', "learner.lr is the same in all runs"),
        (
            'baseline = { "method.name" = "grpo_full" }',
            'baseline = { "method.name" = "grpo" }',
            "its baseline: method.name =",
        ),
        (
            'baseline = { "pool.max_staleness" = 2 }',
            'baseline = { "pool.max_staleness" = 1 }',
            "'staleness' has no run",
        ),
        ("[settings]", "[setings]", r"^setings: unknown key; did you mean settings\?$"),
        ('"pool.max_staleness" = [0, 2]', '"pool.max_staleness" = []', "max_staleness"),
        ('name = "small"', 'name = "a b"', "^study: name: must be letters"),
        ("[study]", "[study", "is not valid TOML"),
        ('"method.name" = ["grpo_full"', '"method.budget" = [7]\n"method.name" = ["grpo_full"', r"method.budget = 7"),
    ],
)
def test_a_study_that_cannot_be_made_is_refused_in_words(tmp_path, old, new, said):
    with pytest.raises(ConfigError, match=said) as refused:
        plan_of(tmp_path, (old, new))
    assert "\n" not in str(refused.value)


def test_keys_without_quotes_are_the_same_settings(tmp_path):
    plain = plan_of(tmp_path, ('"run.steps" = 4', "run.steps = 4"), ('"method.name" = ["grpo', 'method.name = ["grpo'))
    assert plain.runs.keys() == plan_of(tmp_path).runs.keys()


def test_parts_of_another_name_are_told_theirs(tmp_path):
    with pytest.raises(ConfigError, match=r"^parts: unknown key; did you mean \[\[part\]\]\?$"):
        plan_of(tmp_path, ("[[part]]", "[[parts]]"), ("[part.grid]", "[parts.grid]"))


def test_the_config_of_a_run_is_told_from_a_study(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[run]\nname = "mine"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{path} is the config of a run, not a study; .*`cusearch launch {path}`"):
        read_plan(path)
