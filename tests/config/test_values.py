"""The config: what is wrong with one is said in a line that names the key, the value and the remedy."""

from __future__ import annotations

import math
import operator
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
WHOLE_POOL = ("grpo_full", "dapo", "stratified_grpo", "ar3po")


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
        ("loss.minibach = 16", "loss.minibach: unknown key; did you mean loss.minibatch?"),
        ("lerner.lr = 1e-6", "lerner: unknown key; did you mean learner?"),
        ("pool.max_stalness = 1", "pool.max_stalness: unknown key; did you mean pool.max_staleness?"),
        ("qqq.x = 1", "qqq: unknown key; `cusearch config` lists all"),
        ("trainer.x = 1", "trainer: unknown key; did you mean learner?"),
        ("learner.learning_rate = 1", "learner.learning_rate: unknown key; did you mean learner.lr?"),
        ("loss.lr = 1", "loss.lr: unknown key; did you mean learner.lr?"),
        ("pool.max_staleness = true", "pool.max_staleness: must not be true or false, got true"),
        ("learner.lr = false", "learner.lr: must not be true or false, got false"),
        ("learner.cores = [0, true]", "learner.cores: must not be true or false, got [0, true]"),
        ("pool.max_staleness = -1", "pool.max_staleness: input should be greater than or equal to 0, got -1"),
        ("pool.max_staleness = 1.5", "pool.max_staleness: .*integer.*, got 1.5"),
        ('pool.order = "random"', "pool.order: .*'ticket', 'deferred' or 'oldest_complete', got 'random'"),
        ("learner.lr = 0", "learner.lr: input should be greater than 0, got 0"),
        ("learner.lr = inf", "learner.lr: input should be a finite number, got inf"),
        ("redis.lease_s = inf", "redis.lease_s: input should be a finite number, got inf"),
        ("learner.gpus = [-1]", "learner.gpus.*: .*greater than or equal to 0, got -1"),
        ("run.seed = 18446744073709551616", "run.seed: .*less than 9223372036854775808.*"),
        ("learner.lr = nan", "learner.lr: .* got nan"),
        ('learner.lr = "fast"', "learner.lr: .*number.*, got 'fast'"),
        ("learner.zero_stage = 4", "learner.zero_stage: input should be less than or equal to 3, got 4"),
        ("learner.ranks = 2\nlearner.gpus = [0, 0]", "learner.gpus [0, 0] names a GPU twice"),
        (
            "rollout.workers = 2\nrollout.gpus = [0]\nrollout.vllm.tensor_parallel_size = 2",
            "rollout.gpus [0] must name at least 2: rollout.vllm.tensor_parallel_size",
        ),
        ("rollout.enforce_eager = true", ".*unknown key; did you mean rollout.vllm.enforce_eager?"),
        (
            "rollout.vllm.speculative_config = {}",
            "rollout.vllm: speculative_config cannot be passed on to vLLM: drafted tokens .*",
        ),
        ('rollout.vllm.dtype = "half"', "rollout.vllm: dtype cannot be passed on to vLLM: use model.dtype"),
        ("rollout.vllm.gpu_memory_utilization = 1.5", "rollout.vllm.gpu_memory_utilization: .* equal to 1, got 1.5"),
        (
            'learner.lora.rank = 8\nrollout.vllm.quantization = "fp8"',
            "learner.lora.rank is 8, but rollout.vllm.quantization = 'fp8': .*; remove one of them",
        ),
        (
            "learner.lora.rank = 8\nlearner.trained_layers = 2",
            "learner.trained_layers (2) must not be set with learner.lora.rank (8): the adapter alone is trained",
        ),
        ("learner.lora.rank = 1024", "learner.lora.rank: .* equal to 512, got 1024"),
        (
            'learner.lora.targets = ["all-linear", "q_proj"]',
            "learner.lora.targets: 'all-linear' cannot be combined with other targets, got .*",
        ),
        ('learner.lora.targets = "lm_head"', "learner.lora.targets: lm_head cannot have an adapter; .*"),
        ("rollout.vllm.max_loras = 2", "rollout.vllm: max_loras cannot be passed on to vLLM: .*use learner.lora"),
        (
            'rollout.vllm.quantization = "fp8"\nloss.correction = "none"',
            "loss.correction is 'none', but rollout.vllm quantises .*",
        ),
        (
            "learner.deepspeed.zero_optimization.stage = 3",
            "learner.deepspeed: stage cannot be passed on to DeepSpeed's zero_optimization: use learner.zero_stage",
        ),
        (
            "learner.zero_stage = 0\nlearner.deepspeed.zero_optimization.offload_optimizer = {device = 'cpu'}",
            "learner.deepspeed.zero_optimization.offload_optimizer needs learner.zero_stage = 1, 2 or 3, got 0",
        ),
        (
            "learner.deepspeed.zero_optimization.offload_param = {device = 'gpu'}",
            "learner.deepspeed: zero_optimization.offload_param needs device = 'cpu' or 'nvme', got 'gpu'",
        ),
        (
            "learner.deepspeed.zero_optimization.offload_optimizer = {device = 'nvme'}",
            "learner.deepspeed: zero_optimization.offload_optimizer needs device = 'cpu', got 'nvme'",
        ),
        (
            "learner.deepspeed.zero_optimization.offload_param = {device = 'cpu'}",
            "learner.deepspeed.zero_optimization.offload_param needs learner.zero_stage = 3, got 1",
        ),
        (
            'learner.deepspeed.zero_optimization.offload_optimizer = "cpu"',
            "learner.deepspeed: zero_optimization.offload_optimizer must be a table, like {device = 'cpu'}, got 'cpu'",
        ),
        (
            'learner.zero_stage = 0\nlearner.deepspeed.grad_accum_dtype = "bf16"\nmodel.dtype = "float32"',
            "learner.deepspeed.grad_accum_dtype = 'bf16' needs model.dtype = 'bfloat16', or learner.zero_stage above 0",
        ),
        (
            'weights.transport = "object"\nweights.objects = "s3://b/x"\nweights.url = "http://h:1"',
            "weights.url is http://h:1, which is of no use without weights.transport = 'http'",
        ),
        ("learner.deepspeed.fp16 = {enabled = true}", "learner.deepspeed.fp16: unknown key; .*"),
        ("episode.s_max = 0", "episode.s_max: input should be greater than or equal to 1, got 0"),
        ('episode.template = "mine"', "episode.template: unknown key; did you mean environment.LABEL.template?"),
        ('environment.a.template = "mine"', "environment.a.template: 'mine' is not a template .*"),
        ('environment.a.name = "calculator"', "environment.a: name 'calculator' is unknown; use one of search.*"),
        ('environment.a.name = "no_such:Thing"', "environment.a: name: module 'no_such' .* cannot be imported .*"),
        ('environment.a.name = "os:path"', "environment.a: name: 'os:path' must be a subclass of .*Environment.*"),
        ('environment.a.reward = "judge"', "environment.a: reward 'judge' is unknown; write it as .*module:Name"),
        ('environment.a.reward = "os:sep"', "environment.a: reward: 'os:sep' must be a function, got '/'"),
        ("environment.a.share = 0", "environment.a.share: input should be greater than or equal to 1, got 0"),
        ("environment.a.topk = 3", "environment.a.topk: unknown key; did you mean retriever.topk?"),
        ("environment.a.format_weigth = 3", "environment.a.format_weigth: unknown key; .*a.format_weight?"),
        ("environment.a.format_weight = 3", "environment.a.format_weight: input should be less than or .* 1, got 3"),
        ('environment."a b" = {}', "environment.a b: must be letters, digits, .*, got 'a b'"),
        ('environment."a.b" = {}', "environment.a.b: must be letters, digits, .*, got 'a.b'"),
        ("environment = {}", "environment: .* at least 1 item.*, got {}"),
        ('eval.environment = "b"', "eval.environment 'b' must be one of the run's: search"),
        ('environment.a.document_template = "{body}"', "environment.a.document_template: .*may use {rank}.*body.*"),
        ('environment.a.document_template = "{title}"', "environment.a.document_template: .*must have {text}.*"),
        (
            "environment.search.format_weight = 0.2\nenvironment.serch.format_weight = 0.5",
            "environment.serch: did you mean search? An environment beside it needs its name",
        ),
        ('environment.a.document_template = "{"', "environment.a.document_template: .* {title} and {text} only.*"),
        ('environment.a.document_template = "{text.body}"', "environment.a.document_template: .*may use .*only.*"),
        ('method.name = "ppo"', "method.name 'ppo' is unknown; use one of sdga_phase, .*dapo"),
        ("method.phase_reserve = 1", "method.phase_reserve: input should be less than 1, got 1"),
        (
            "method.budget = 224",
            "method.budget (K = 224) must be <= pool.questions x pool.rollouts (N G = 192); lower it or raise those",
        ),
        (
            'method = {name = "grpo_half", budget = 96}\npool = {questions = 8, rollouts = 8}',
            "method.budget (K = 96) must be <= pool.questions x pool.rollouts (N G = 64); lower it or raise those",
        ),
        (
            'method.name = "grpo_half"\nmethod.budget = 64\npool.questions = 30',
            "method.budget (K = 64) must be a multiple of pool.rollouts (G = 3) for grpo_half, which generates .*",
        ),
        (
            'method.name = "ar3po"\nrollout.max_episodes = 5',
            "rollout.max_episodes (5) must be >= 6, the largest group that ar3po makes: .*",
        ),
        ("rollout.max_episodes = 2", "rollout.max_episodes (2) must be >= 3, the largest group that sdga_phase"),
        ("loss.dual_clip = 1", "loss.dual_clip: input should be greater than 1, got 1"),
        ('loss.ratio = "word"', "loss.ratio: .*'token' or 'sequence', got 'word'"),
        ("method.budget = 100", "method.budget (K = 100) must be a multiple of loss.minibatch (M = 32)"),
        (
            "learner.publish_every = 4",
            "pool.max_staleness (2) must be >= learner.publish_every - 1 (3): workers would wait for weights that .*",
        ),
        ("redis.max_trajectories = 767", "redis.max_trajectories (767) must be >= (pool.max_staleness + 2) N G = 768"),
        (
            'loss.correction = "icepop"\nloss.correction_low = 3.0',
            "loss.correction_low (3.0) must be <= loss.correction_high (2.0)",
        ),
        (
            'loss.correction = "geometric"\nloss.correction_low = 6.0\nloss.correction_high = 5.0',
            "loss.correction_low (6.0) must be <= loss.correction_high (5.0)",
        ),
        ('redis.url = "http://h"', "redis: url 'http://h' must look like redis://127.0.0.1:6379/0"),
        ('redis.url = "redis://"', "redis: url 'redis://' must look like redis://127.0.0.1:6379/0"),
        ('redis.url = "redis://[::1"', "redis: .*must look like redis://127.0.0.1:6379/0"),
        ('redis.url = "redis://h:port/0"', "redis: .*must look like redis://127.0.0.1:6379/0"),
        (
            'redis.url = "redis://user:hunter2@h:1/0"',
            "redis: url must not hold a password; set CUSEARCH_REDIS_PASSWORD instead",
        ),
        (
            'redis.url = "redis://h:1/0?username=u"',
            "redis: url must give the user before the host, like redis://USER@H.*",
        ),
        ('retriever.url = "h:8000"', "retriever.url: url 'h:8000' must look like http://127.0.0.1:8000"),
        ('retriever.url = "http://h:port"', "retriever.url: .*must look like http://127.0.0.1:8000"),
        ("retriever.latency_median_s = 1.0", "retriever: latency_p99_s (0.0) must be >= latency_median_s (1.0)"),
        ("run.colocate = true", "run.colocate needs learner.reference = 'cpu': it would stay on the GPU"),
        ("run.colocate = true\nlearner.zero_stage = 3", "run.colocate needs learner.zero_stage = 1 or 2, got 3: "),
        ("run.colocate = true\nlearner = {nodes = 2, ranks = 2}", "run.colocate needs learner.nodes = 1, got 2: "),
        (
            "run.colocate = true\nlearner.reference = 'cpu'\n"
            "learner.deepspeed.zero_optimization.offload_optimizer.device = 'cpu'",
            "run.colocate needs no zero_optimization.offload_optimizer: all is moved",
        ),
        ("weights.url = '10.0.0.5:29400'", "weights.url: url '10.0.0.5:29400' must look like http://10.0.0.5:29400"),
        ("weights.url = 'tcp://10.0.0.5:29400'", "weights.url: url 'tcp://10.0.0.5:29400' must look like http://10"),
        ("weights.url = 'http://h:29400'", ".*is of no use without weights.transport = 'http'"),
        ("weights.upstream = 'http://h:29400'", "weights.upstream (http://h:29400) needs weights.url"),
        ("weights.transport = 'http'", "weights.transport is 'http', which needs weights.url, like http://"),
        (
            "weights = {transport = 'http', url = 'http://h:1'}\neval = {in_order = true, every = 1}",
            "eval.in_order needs weights.transport = 'folder' or 'object': the weights outlive the learner",
        ),
        ("learner = {compile = true, zero_stage = 3}", "learner.compile needs learner.zero_stage at most 2, got 3"),
        ("learner = {compile = true, lora.rank = 8}", "learner.compile needs learner.lora.rank = 0, got 8"),
        (
            "learner = {compile = true, gradient_checkpointing = true}",
            "learner.compile needs learner.gradient_checkpointing = false",
        ),
        (
            "learner = {compile = true, attention = 'varlen'}",
            "learner.compile needs learner.attention = 'sdpa', got 'varlen'",
        ),
        ("model = 3", "model: must be a section, [model] with its settings below, got 3"),
    ],
)
def test_a_mistake_is_said_in_one_line(write, text, message):
    """Where `.*` stands the words are pydantic's, or free."""
    found = error_of(write(text, run='run.name = "r"'))
    assert re.fullmatch(pattern_of(message) + ".*", found), found


@pytest.mark.parametrize("key", ["learner.grad_clip", "loss.correction_high"])
def test_a_bound_may_be_infinite(write, key):
    """That is without one; no other number may be."""
    section, _, name = key.partition(".")
    config = load_config(write(), [f"--{key}", "inf"])
    assert getattr(getattr(config, section), name) == math.inf


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


@pytest.mark.parametrize(
    "text",
    [
        "learner.publish_every = 3",
        "method.budget = 192",
        *(f'method = {{name = "{name}", budget = 100}}\npool = {{questions = 8, rollouts = 8}}' for name in WHOLE_POOL),
        'method = {name = "grpo_half", budget = 64}\npool = {questions = 8, rollouts = 8}',
        "learner.compile = true",
        "run.colocate = true\nlearner.lora.rank = 8",  # an adapter has no reference model
    ],
)
def test_what_just_fits_is_fine(write, text):
    load_config(write(text, run='run.name = "r"'))


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


@pytest.mark.parametrize("key", ["trained_layers", "checkpoint_objects"])
def test_a_later_file_leaves_a_setting_out(write, tmp_path, key):
    earlier = write("learner.trained_layers = 10\nlearner.checkpoint_objects = 's3://bucket/prefix'")
    (later := tmp_path / "later.toml").write_text(f'learner.{key} = "none"')
    for config in (load_config([earlier, later]), load_config(earlier, [f"--learner.{key}", "none"])):
        assert getattr(config.learner, key) is None
        save_config(config, saved := tmp_path / "saved.toml")
        assert load_config(saved) == config
    assert load_config(earlier, ["--loss.correction", "none"]).loss.correction == "none"


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("alarms.url", *2 * ["https://h.example/hooks/7/?api-version=1&sp=run"]),
        ("retriever.web.url", *2 * ["https://serpapi.com/search?gl=de"]),
        ("alarms.command", '["/opt/my tools/page", "{text}"]', ("/opt/my tools/page", "{text}")),
    ],
)
def test_what_is_used_as_it_is_given_is_not_changed(atlas_config, key, text, value):
    """A query was refused as not sent, and a program of the learner's machine on all others."""
    config = load_config(atlas_config, [f"--{key}", text])
    assert operator.attrgetter(key)(config) == value


def test_a_saved_config_replaces_the_old_one_and_states_every_key_that_is_set(write, tmp_path):
    path = tmp_path / "resolved.toml"
    save_config(load_config(write(), ["--run.folder", "x"]), path)
    config = load_config(write(), ["--learner.lr", "5e-5"])
    save_config(config, path)
    saved = tomllib.loads(path.read_text(encoding="utf-8"))
    unset = {
        "run.folder",
        "run.gpu_gib",
        "learner.trained_layers",
        "weights.folder",
        "weights.url",
        "weights.upstream",
        "redis.max_trajectories",
        "eval.judge.url",
        "alarms.url",
        "weights.objects",
        "learner.checkpoint_objects",
    }
    unset |= {"loss.dual_clip", "loss.correction_high", "retriever.index", "retriever.rerank.model", "eval.limit"}
    unset |= {"retriever.zerosearch.steps", "environment.search.reward", "method.strata_weight"}  # another method's
    unset |= {
        f"environment.search.{key}"
        for key in (
            "agent",
            "command",
            "passes",
            "remote",
            "silence_s",
            "tools",
            "ignores",
            "parser",
            "reasoning_parser",
            "searches",
        )
    }  # another environment's
    unset |= {f"learner.deepspeed.{key}" for key in ("grad_accum_dtype", "communication_data_type")}
    engine = ("gpu_memory_utilization", "kv_cache_memory_bytes", "block_size", "max_num_batched_tokens")
    unset |= {f"rollout.vllm.{key}" for key in (*engine, "enable_chunked_prefill", "quantization")}
    unset |= {f"retriever.web.{key}" for key in ("url", "max_requests", "cache")}
    unset |= {f"retriever.dense.{key}" for key in ("pooling", "query_prefix", "passage_prefix")}
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
