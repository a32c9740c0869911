"""The config: what is wrong with one is said in a line that names the key, the value and the remedy."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cusearch_async.config import (
    Config,
    LearnerConfig,
    LossConfig,
    MethodConfig,
    PoolConfig,
    RunConfig,
    known_keys,
    load_config,
    redis_password,
    save_config,
)
from cusearch_async.errors import ConfigError
from tests.config.lines import error_of, pattern_of

CONFIGS = Path(__file__).parents[2] / "configs"


def test_a_run_needs_nothing_but_a_name(write):
    config = load_config(write())
    assert config == Config(run=RunConfig(name="r"))


def test_the_defaults_are_the_papers_batch(write):
    config = load_config(write())
    assert (config.pool.questions, config.pool.rollouts, config.pool.size) == (64, 3, 192)
    assert (config.method.budget, config.loss.minibatch, config.episode.s_max) == (96, 32, 5)
    assert (config.method.name, config.method.phase_reserve, config.method.singleton) == ("sdga_phase", 0.0, "raw")
    assert (config.loss.clip_low, config.loss.clip_high, config.loss.kl_coef) == (0.2, 0.2, 0.001)
    assert (config.environment["search"].own.format_weight, config.run.steps) == (0.2, 203)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_the_shipped_configs_load(path):
    assert load_config(path).run.name


@pytest.mark.parametrize("over", sorted(CONFIGS.glob("paper/**/*.toml")), ids=lambda path: path.name)
def test_the_papers_settings_are_its_table_and_else_zerosearchs(over):
    config = load_config([CONFIGS / "paper/base.toml", over])
    assert (config.pool.questions, config.pool.rollouts, config.loss.minibatch, config.episode.s_max) == (64, 3, 32, 5)
    assert (config.learner.lr, config.loss.kl_coef) == (1e-6, 0.001)
    assert config.environment["search"].own.format_weight == 0.2
    assert (config.run.steps, config.learner.warmup_steps, config.learner.weight_decay) == (203, 192, 0.01)
    assert (config.episode.max_turn_tokens, config.loss.entropy_coef) == (500, 0.0), "the paper's loss has no bonus"


def test_derived_numbers(write):
    config = load_config(write())
    assert config.folder == Path("runs/r")
    assert config.buffer_limit == (2 + 2) * 192
    assert config.episode.max_tokens == 512 + 6 * 500 + 5 * 500
    changed = load_config(write(), ["--run.folder", "elsewhere", "--redis.max_trajectories", "1000"])
    assert (changed.folder, changed.buffer_limit) == (Path("elsewhere"), 1000)


# What is wrong with a config, in one line.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[loss]\nminibach = 16", "loss.minibach: unknown key; did you mean loss.minibatch?"),
        ("[lerner]\nlr = 1e-6", "lerner: unknown key; did you mean learner?"),
        ("[pool]\nmax_stalness = 1", "pool.max_stalness: unknown key; did you mean pool.max_staleness?"),
        ("[qqq]\nx = 1", "qqq: unknown key; `cusearch config` lists all"),
        ("[trainer]\nx = 1", "trainer: unknown key; did you mean learner?"),
        ("[learner]\nlearning_rate = 1", "learner.learning_rate: unknown key; did you mean learner.lr?"),
        ("[loss]\nlr = 1", "loss.lr: unknown key; did you mean learner.lr?"),
        ("[pool]\nmax_staleness = true", "pool.max_staleness: must not be true or false, got true"),
        ("[learner]\nlr = false", "learner.lr: must not be true or false, got false"),
        ("[learner]\ncores = [0, true]", "learner.cores: must not be true or false, got [0, true]"),
        ("[pool]\nmax_staleness = -1", "pool.max_staleness: input should be greater than or equal to 0, got -1"),
        ("[pool]\nmax_staleness = 1.5", "pool.max_staleness: .*integer.*, got 1.5"),
        ('[pool]\norder = "random"', "pool.order: .*'ticket' or 'oldest_complete', got 'random'"),
        ("[learner]\nlr = 0", "learner.lr: input should be greater than 0, got 0"),
        ("[learner]\nlr = nan", "learner.lr: .* got nan"),
        ('[learner]\nlr = "fast"', "learner.lr: .*number.*, got 'fast'"),
        ("[learner]\nzero_stage = 4", "learner.zero_stage: input should be less than or equal to 3, got 4"),
        ("[learner]\nranks = 2\ngpus = [0, 0]", "learner.gpus [0, 0] names a GPU twice"),
        (
            "[rollout]\nworkers = 2\ngpus = [0]\nvllm.tensor_parallel_size = 2",
            "rollout.gpus [0] must name at least 2: rollout.vllm.tensor_parallel_size for an engine",
        ),
        ("[rollout]\nkv_cache_mib = 1", ".*; did you mean rollout.vllm.kv_cache_memory_bytes?"),
        ("[rollout]\nenforce_eager = true", ".*unknown key; did you mean rollout.vllm.enforce_eager?"),
        (
            "[rollout.vllm]\nspeculative_config = {}",
            "rollout.vllm: speculative_config cannot be passed on to vLLM: drafted tokens .*",
        ),
        ('[rollout.vllm]\ndtype = "half"', "rollout.vllm: dtype cannot be passed on to vLLM: use model.dtype"),
        ("[rollout.vllm]\ngpu_memory_utilization = 1.5", "rollout.vllm.gpu_memory_utilization: .* equal to 1, got 1.5"),
        (
            '[learner.lora]\nrank = 8\n[rollout.vllm]\nquantization = "fp8"',
            "learner.lora.rank is 8, but rollout.vllm.quantization = 'fp8': .*; remove one of them",
        ),
        ("[learner.lora]\nrank = 1024", "learner.lora.rank: .* equal to 512, got 1024"),
        ('[learner.lora]\ntargets = ["all-linear", "q_proj"]', "learner.lora.targets: 'all-linear' stands alone, .*"),
        ('[learner.lora]\ntargets = "lm_head"', "learner.lora.targets: lm_head cannot have an adapter; .*"),
        ("[rollout.vllm]\nmax_loras = 2", "rollout.vllm: max_loras cannot be passed on to vLLM: .*use learner.lora"),
        (
            '[rollout.vllm]\nquantization = "fp8"\n[loss]\ncorrection = "none"',
            "loss.correction is 'none', but rollout.vllm quantises .*",
        ),
        (
            "[learner.deepspeed]\nzero_optimization.stage = 3",
            "learner.deepspeed: stage cannot be passed on to DeepSpeed's zero_optimization: use learner.zero_stage",
        ),
        (
            "[learner.deepspeed]\nzero_optimization.offload_param = {device = 'gpu'}",
            "learner.deepspeed: zero_optimization.offload_param needs device = 'cpu' or 'nvme', got 'gpu'",
        ),
        (
            "[learner.deepspeed]\nzero_optimization.offload_optimizer = {device = 'nvme'}",
            "learner.deepspeed: zero_optimization.offload_optimizer needs device = 'cpu', got 'nvme'",
        ),
        (
            "[learner.deepspeed]\nzero_optimization.offload_param = {device = 'cpu'}",
            "learner.deepspeed.zero_optimization.offload_param needs learner.zero_stage = 3, got 1",
        ),
        ("[learner.deepspeed]\nfp16 = {enabled = true}", "learner.deepspeed.fp16: unknown key; .*"),
        ("[episode]\ns_max = 0", "episode.s_max: input should be greater than or equal to 1, got 0"),
        ('[episode]\ntemplate = "mine"', "episode.template: unknown key; did you mean environment.LABEL.template?"),
        (
            '[environment.a]\ntemplate = "mine"',
            "environment.a.template: 'mine' is not a template .*",
        ),
        (
            '[environment.a]\nname = "calculator"',
            "environment.a: name 'calculator' is unknown; use one of search.*",
        ),
        (
            '[environment.a]\nname = "no_such:Thing"',
            "environment.a: name: module 'no_such' .* cannot be imported .*",
        ),
        (
            '[environment.a]\nname = "os:path"',
            "environment.a: name: 'os:path' must be a subclass of .*Environment.*",
        ),
        (
            '[environment.a]\nreward = "judge"',
            "environment.a: reward 'judge' is unknown; write it as .*module:Name",
        ),
        ('[environment.a]\nreward = "os:sep"', "environment.a: reward: 'os:sep' must be a function, got '/'"),
        ("[environment.a]\nshare = 0", "environment.a.share: input should be greater than or equal to 1, got 0"),
        ("[environment.a]\ntopk = 3", "environment.a.topk: unknown key; did you mean retriever.topk?"),
        (
            "[environment.a]\nformat_weigth = 3",
            "environment.a.format_weigth: unknown key; .*a.format_weight?",
        ),
        ("[environment.a]\nformat_weight = 3", "environment.a.format_weight: input should be less than or .* 1, got 3"),
        ('[environment."a b"]', "environment.a b.[key]: must be letters, digits, .*, got 'a b'"),
        ('[environment."a.b"]', "environment.a.b.[key]: must be letters, digits, .*, got 'a.b'"),
        ("environment = {}", "environment: .* at least 1 item.*, got {}"),
        ('[eval]\nenvironment = "b"', "eval.environment 'b' must be one of the run's: search"),
        (
            '[environment.a]\ndocument_template = "{body}"',
            "environment.a.document_template: .*may use {rank}.*body.*",
        ),
        ('[environment.a]\ndocument_template = "{"', "environment.a.document_template: .* {title} and {text} only.*"),
        (
            '[environment.a]\ndocument_template = "{text.body}"',
            "environment.a.document_template: .*may use .*only.*",
        ),
        ('[method]\nname = "ppo"', "method.name 'ppo' is unknown; use one of sdga_phase, .*dapo"),
        ("[method]\nphase_reserve = 1", "method.phase_reserve: input should be less than 1, got 1"),
        (
            "[method]\nbudget = 224",
            "method.budget (K = 224) must be <= pool.questions x pool.rollouts (N G = 192); lower it or raise those",
        ),
        (
            '[method]\nname = "grpo_half"\nbudget = 64\n[pool]\nquestions = 30',
            "method.budget (K = 64) must be a multiple of pool.rollouts (G = 3) for grpo_half, which generates K / G "
            "groups",
        ),
        (
            '[method]\nname = "ar3po"\n[rollout]\nmax_episodes = 5',
            "rollout.max_episodes (5) must be >= 6, the largest group that ar3po makes: a worker plays whole groups",
        ),
        ("[rollout]\nmax_episodes = 2", "rollout.max_episodes (2) must be >= 3, the largest group that sdga_phase"),
        ("[loss]\ndual_clip = 1", "loss.dual_clip: input should be greater than 1, got 1"),
        ('[loss]\nratio = "word"', "loss.ratio: .*'token' or 'sequence', got 'word'"),
        ("[method]\nbudget = 100", "method.budget (K = 100) must be a multiple of loss.minibatch (M = 32)"),
        (
            "[learner]\npublish_every = 4",
            "pool.max_staleness (2) must be >= learner.publish_every - 1 (3): workers would wait for weights that are "
            "never published",
        ),
        (
            "[redis]\nmax_trajectories = 767",
            "redis.max_trajectories (767) must be >= (pool.max_staleness + 2) N G = 768",
        ),
        ("[loss]\ncorrection_low = 3.0", "loss.correction_low (3.0) must be <= loss.correction_high (2.0)"),
        (
            '[loss]\ncorrection = "mask"\ncorrection_low = 6.0',
            "loss.correction_low (6.0) must be <= loss.correction_high (5.0)",
        ),
        ('[redis]\nurl = "http://h"', "redis: url 'http://h' must look like redis://127.0.0.1:6379/0"),
        ('[redis]\nurl = "redis://"', "redis: url 'redis://' must look like redis://127.0.0.1:6379/0"),
        ('[redis]\nurl = "redis://[::1"', "redis: .*must look like redis://127.0.0.1:6379/0"),
        ('[redis]\nurl = "redis://h:port/0"', "redis: .*must look like redis://127.0.0.1:6379/0"),
        (
            '[redis]\nurl = "redis://user:hunter2@h:1/0"',
            "redis: url must not hold a password; set CUSEARCH_REDIS_PASSWORD instead",
        ),
        (
            '[redis]\nurl = "redis://h:1/0?username=u"',
            "redis: url must give the user before the host, like redis://USER@H.*",
        ),
        ('[retriever]\nurl = "h:8000"', "retriever: url 'h:8000' must look like http://127.0.0.1:8000"),
        ('[retriever]\nurl = "http://h:port"', "retriever: .*must look like http://127.0.0.1:8000"),
        (
            "[retriever]\nlatency_median_s = 1.0",
            "retriever: latency_p99_s (0.0) must be >= latency_median_s (1.0)",
        ),
        ("model = 3", "model: must be a section, [model] with its settings below, got 3"),
    ],
)
def test_a_mistake_is_said_in_one_line(write, text, message):
    """Where `.*` stands the words are pydantic's, or free."""
    found = error_of(write(text))
    assert re.fullmatch(pattern_of(message) + ".*", found), found


@pytest.mark.parametrize("name", ["a b", "", "-x", "a/b", "a:b", "{a}", "ü"])
def test_a_run_name_that_is_no_plain_word_is_refused(write, name):
    found = error_of(write(run=f'[run]\nname = "{name}"\n'))
    assert found.startswith("run.name: ")
    assert found.endswith(f"got {name!r}")


def test_what_is_missing_is_named(write):
    assert error_of(write(run="")) == 'run: is missing; every config names its run: [run] name = "mine"'
    assert error_of(write(run="[run]\nsteps = 3\n")).startswith("run.name: is missing")


def test_two_mistakes_are_two_lines(write):
    assert error_of(write("[pool]\nrollouts = 0\n[learner]\nlr = -1.0\n")).splitlines() == [
        "pool.rollouts: input should be greater than or equal to 1, got 0",
        "learner.lr: input should be greater than 0, got -1.0",
    ]


def test_the_widest_publishing_that_staleness_allows_is_fine(write):
    assert load_config(write("[learner]\npublish_every = 3\n")).learner.publish_every == 3


def test_a_budget_of_the_whole_pool_is_fine(write):
    assert load_config(write("[method]\nbudget = 192\n")).method.budget == 192


# Saving.


@st.composite
def configs(draw):
    questions, rollouts = draw(st.integers(1, 40)), draw(st.integers(1, 8))
    budget = draw(st.integers(1, questions * rollouts))
    minibatch = draw(st.sampled_from([m for m in range(1, budget + 1) if budget % m == 0]))
    text = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="$~"), max_size=12)
    return Config(
        run=RunConfig(
            name=draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,9}", fullmatch=True)),
            seed=draw(st.integers(0, 2**40)),
            folder=draw(st.none() | st.just(Path("out") / "a folder")),
        ),
        pool=PoolConfig(questions=questions, rollouts=rollouts, max_staleness=draw(st.integers(0, 5))),
        method=MethodConfig(budget=budget, phase_reserve=draw(st.floats(0, 1, exclude_max=True))),
        loss=LossConfig(minibatch=minibatch, clip_high=draw(st.floats(1e-9, 1e9))),
        learner=LearnerConfig(
            lr=draw(st.floats(1e-12, 1)), cores=tuple(draw(st.lists(st.integers(0, 99), max_size=4)))
        ),
        model={"path": draw(text)},
        data={"source": [draw(text)]},
    )


@given(config=configs())
def test_a_saved_config_is_read_back_as_it_was(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("saved") / "run" / "config.toml"
    save_config(config, path)
    assert load_config(path) == config
    assert [file.name for file in path.parent.iterdir()] == ["config.toml"]


def dotted(values, prefix=""):
    for key, value in values.items():
        if prefix:
            yield prefix + key
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{key}.")


def test_a_saved_config_replaces_the_old_one_and_states_every_key_that_is_set(write, tmp_path):
    path = tmp_path / "resolved.toml"
    save_config(load_config(write(), ["--run.folder", "x"]), path)
    config = load_config(write(), ["--learner.lr", "5e-5"])
    save_config(config, path)
    saved = tomllib.loads(path.read_text(encoding="utf-8"))
    unset = {
        "run.folder",
        "weights.folder",
        "weights.url",
        "loss.dual_clip",
        "redis.max_trajectories",
        "eval.judge.url",
    }
    unset |= {"method.strata_weight"}  # another method's
    unset |= {f"learner.deepspeed.{key}" for key in ("grad_accum_dtype", "communication_data_type")}
    unset |= {
        f"rollout.vllm.{key}"
        for key in ("gpu_memory_utilization", "kv_cache_memory_bytes", "block_size", "max_num_batched_tokens")
    }
    unset |= {"rollout.vllm.enable_chunked_prefill", "rollout.vllm.quantization"}
    unset |= {
        "loss.correction_high",
        "run.gpu_gib",
        "retriever.index",
        "retriever.rerank.model",
        "retriever.zerosearch.steps",
        "eval.limit",
    }
    unset |= {f"retriever.web.{key}" for key in ("url", "max_requests", "cache")}
    unset |= {f"retriever.dense.{key}" for key in ("pooling", "query_prefix", "passage_prefix")}
    unset.add("environment.search.reward")
    keys = {key.replace("LABEL", "search") for key in known_keys() if "." in key} | {"environment.search"}
    assert set(dotted(saved)) == keys - unset
    assert load_config(path) == config


def test_the_password_comes_from_the_environment_and_is_not_saved(write, tmp_path, monkeypatch):
    config = load_config(write(), ["--run.folder", str(tmp_path / "run")])
    monkeypatch.delenv("CUSEARCH_REDIS_PASSWORD", raising=False)
    assert redis_password(config.redis, config.folder) is None
    monkeypatch.setenv("CUSEARCH_REDIS_PASSWORD", "")
    assert redis_password(config.redis, config.folder) is None
    monkeypatch.setenv("CUSEARCH_REDIS_PASSWORD", "hunter2")
    assert redis_password(config.redis, config.folder) == "hunter2"
    path = tmp_path / "resolved.toml"
    save_config(config, path)
    assert "hunter2" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        ((), "learner.reference = 'cpu': it would stay on the GPU"),
        (("--learner.zero_stage", "3"), "learner.zero_stage = 1 or 2, got 3: .*"),
        (("--learner.nodes", "2", "--learner.ranks", "2"), "learner.nodes = 1, got 2: .*"),
        (
            (
                "--learner.reference",
                "cpu",
                "--learner.deepspeed.zero_optimization.offload_optimizer",
                "{device = 'cpu'}",
            ),
            "no zero_optimization.offload_optimizer: all is moved",
        ),
    ],
)
def test_who_takes_turns_must_be_able_to_leave_the_gpu(atlas_config, overrides, needed):
    with pytest.raises(ConfigError, match=f"run.colocate needs {needed}"):
        load_config(atlas_config, ["--run.colocate", "true", *overrides])


WITH_HTTP = ("--weights.transport", "http", "--weights.url", "http://10.0.0.5:29400")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("--weights.url", "10.0.0.5:29400"), "weights.url: url '10.0.0.5:29400' must look like http://10.0.0.5:29400"),
        (
            ("--weights.url", "tcp://10.0.0.5:29400"),
            "weights.url: url 'tcp://10.0.0.5:29400' must look like http://10.0.0.5:29400",
        ),
        (("--weights.url", "http://10.0.0.5:29400"), "of no use without weights.transport = 'http'"),
        (("--weights.transport", "http"), "weights.transport is 'http', which needs weights.url, like http://"),
        (
            (*WITH_HTTP, "--eval.in_order", "true", "--eval.every", "1"),
            "eval.in_order needs weights.transport = 'folder': what waits there outlives the learner",
        ),
    ],
)
def test_weights_that_have_no_way_are_refused(atlas_config, overrides, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(atlas_config, overrides)


def test_gradients_in_float32_need_an_optimizer_whose_checkpoints_can_be_continued(atlas_config):
    """At stage 1 DeepSpeed took one whose state names no stage: every resume ended in a KeyError."""
    own = ["--model.dtype", "bfloat16", "--learner.deepspeed.grad_accum_dtype", "fp32", "--learner.zero_stage"]
    for stage in ("0", "1"):
        with pytest.raises(ConfigError, match=f"needs learner.zero_stage = 2 or 3, got {stage}"):
            load_config(atlas_config, [*own, stage])
    offload = ["--learner.deepspeed.zero_optimization.offload_optimizer.device", "cpu"]
    assert load_config(atlas_config, [*own, "1", *offload]).learner.zero_stage == 1
    assert load_config(atlas_config, [*own, "2"]).learner.zero_stage == 2
    assert load_config(atlas_config, ["--learner.deepspeed.grad_accum_dtype", "fp32"]).model.dtype == "float32"


def test_an_adapter_needs_no_reference_in_the_hosts_memory_to_take_turns(atlas_config):
    assert load_config(atlas_config, ["--run.colocate", "true", "--learner.lora.rank", "8"]).run.colocate


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        (("--learner.zero_stage", "3"), "learner.zero_stage at most 2, got 3"),
        (("--learner.lora.rank", "8"), "learner.lora.rank = 0, got 8"),
        (("--learner.gradient_checkpointing", "true"), "learner.gradient_checkpointing = false"),
        (("--learner.attention", "varlen"), "learner.attention = 'sdpa', got 'varlen'"),
    ],
)
def test_compiling_is_refused_with_what_it_has_not_been_tried_with(atlas_config, settings, needed):
    assert load_config(atlas_config, ["--learner.compile", "true"]).learner.compile
    with pytest.raises(ConfigError, match=re.escape(f"learner.compile needs {needed}")):
        load_config(atlas_config, ["--learner.compile", "true", *settings])
