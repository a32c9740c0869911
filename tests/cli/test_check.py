"""`cusearch check`: shipped configs pass, what can never work is an error, what is not there is said."""

from __future__ import annotations

import argparse
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from cusearch_async.algorithm.methods import METHODS
from cusearch_async.cli import check
from cusearch_async.cli.preflight import gpus as gpus_module
from cusearch_async.cli.preflight import memory, speed, workload
from cusearch_async.cli.preflight.finding import Finding
from cusearch_async.cli.preflight.gpus import Device, device_of
from cusearch_async.cli.preflight.shapes import PUBLISHED, shape_of
from cusearch_async.config import Config, load_config
from cusearch_async.errors import ConfigError
from tests.fakes import STARTER

pytestmark = pytest.mark.system  # it builds models of transformers, which takes long

CONFIGS = Path(__file__).parents[2] / "configs"
PAPER = CONFIGS / "paper"
BASE = PAPER / "base.toml"


def run(*arguments: str, overrides: tuple[str, ...] = ()) -> int:
    """The command's exit status."""
    parser = argparse.ArgumentParser()
    check.add(parser)
    try:
        parsed = parser.parse_args(arguments)
        parsed.run(parsed, list(overrides))
    except SystemExit as end:
        return end.code
    return 0


def findings(*overrides: str, path: Path | list[Path] = BASE, gib: float = 80) -> dict[str, Finding]:
    config = load_config(path, overrides)
    device = Device(gib, "as the test says")
    return {finding.what: finding for finding in check.check(config, shape_of(config.model), device)}


def model_folder(folder: Path, context: int, with_tokenizer: bool = True) -> Path:
    """A tiny model's folder."""
    config = Qwen2Config(
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=2,
        vocab_size=384,
        max_position_embeddings=context,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    if with_tokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(STARTER / name, folder)
    return folder


# The shipped configs.


def name_of(path: Path) -> str:
    return path.relative_to(CONFIGS).with_suffix("").as_posix()


@pytest.mark.parametrize(
    "names",
    [
        ["atlas"],
        ["one-gpu-24gb"],
        ["one-gpu-48gb"],
        ["one-gpu-80gb"],
        *(["paper/base", name_of(path)] for path in sorted(PAPER.rglob("*.toml"))),
        *(["paper/base", name_of(path), "paper/search-r1"] for path in sorted(PAPER.glob("models/*"))),
    ],
    ids=" ".join,
)
def test_a_shipped_config_passes(names, capsys, monkeypatch):
    """Whatever this machine's processor is fast at."""
    monkeypatch.setattr(speed, "seconds_per_token", lambda *_: 1e-4)
    monkeypatch.setenv("COLUMNS", "160")
    assert run(*names) == 0
    printed = capsys.readouterr().out
    assert "error" not in printed
    assert "warning" not in printed
    assert ("(chosen)" in printed) == (names != ["atlas"])


@pytest.mark.parametrize("model", [None, "llama-3.2-3b", "qwen2.5-7b"])
@pytest.mark.parametrize("search", ["zerosearch", "search-r1"])
def test_the_paper_configs_hold_the_papers_table(model, search):
    models = [PAPER / "models" / f"{model}.toml"] if model else []
    config = load_config([BASE, *models, *([PAPER / "search-r1.toml"] if search == "search-r1" else [])])
    assert (config.pool.questions, config.pool.rollouts, config.method.budget, config.loss.minibatch) == (64, 3, 96, 32)
    assert (config.episode.s_max, config.learner.lr, config.loss.kl_coef) == (5, 1e-6, 0.001)
    assert (config.method.name, config.run.steps) == ("sdga_phase", 203)
    assert config.environment["search"].own.format_weight == 0.2
    assert config.learner.warmup_steps == int(0.95 * config.run.steps)
    assert config.retriever.topk == (5 if search == "zerosearch" else 3)
    assert config.model.path in PUBLISHED
    simulator = config.retriever.zerosearch
    assert (simulator.url, simulator.p_start, simulator.p_end, simulator.base) == (
        "http://127.0.0.1:6001/v1",
        0.0,
        0.5,
        4.0,
    )


def without_method(config: Config) -> dict[str, object]:
    values = config.model_dump(exclude={"method"})
    values["run"].pop("name")
    return values


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_config_that_differs_in_the_method_alone(name):
    config = load_config([BASE, PAPER / "methods" / f"{name}.toml"])
    assert config.method.name == name
    assert config.run.name.endswith(name)
    assert without_method(config) == without_method(load_config(BASE))
    uses_whole_pool = name in ("grpo_full", "dapo", "ar3po", "stratified_grpo")
    assert config.method.budget == (192 if uses_whole_pool else 96)


def test_no_config_stands_for_a_method_that_does_not_exist():
    assert {path.stem for path in (PAPER / "methods").iterdir()} == set(METHODS)


# What can never work.


def test_a_wrong_config_is_refused_as_everywhere():
    with pytest.raises(ConfigError, match=r"method.budget \(K = 97\) must be a multiple of loss.minibatch"):
        run(str(BASE), overrides=("--method.budget", "97"))


def test_a_context_that_is_too_short_is_an_error(tmp_path, capsys):
    folder = model_folder(tmp_path / "tiny", context=7547)
    assert run(str(BASE), overrides=("--model.path", str(folder))) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "8548 tokens" in printed
    assert "lower one of them" in printed
    model_folder(folder, context=8548)
    assert run(str(BASE), overrides=("--model.path", str(folder))) == 0


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path):
    folder = model_folder(tmp_path / "tiny", context=9000, with_tokenizer=False)
    found = findings("--model.path", str(folder))["tokenizer"]
    assert found.status == "error"
    assert str(folder) in found.text


@pytest.mark.parametrize(("learner", "rollout", "twice"), [("[3, 4, 5, 6]", "[0, 1, 2, 3]", "3 twice")], ids=["shared"])
def test_a_gpu_that_is_named_twice_is_an_error(learner, rollout, twice):
    overrides = ("--learner.gpus", learner, "--rollout.gpus", rollout)
    found = findings(*overrides)["GPUs"]
    assert found.status == "error"
    assert twice in found.text
    assert "set rollout.vllm.gpu_memory_utilization" in found.text
    assert run(str(BASE), overrides=overrides) == 1


def test_the_evaluators_gpu_is_its_own_as_long_as_there_is_one():
    assert findings("--eval.gpus", "[0]")["GPUs"].status == "ok"
    found = findings("--eval.gpus", "[0]", "--eval.every", "10")["GPUs"]
    assert (found.status, "0 more than once" in found.text) == ("error", True)


def test_a_gpu_beyond_the_workers_is_not_used_and_may_be_the_learners():
    assert findings("--rollout.gpus", "[0, 1, 2, 3, 4]")["GPUs"].status == "ok"


def test_gpus_for_fewer_workers_than_there_are_may_be_those_of_each_of_several_hosts():
    found = findings("--rollout.gpus", "[0]")["GPUs"]
    assert (found.status, "`cusearch launch` needs 4" in found.text) == ("warning", True)


def test_memory_that_cannot_fit_is_an_error_with_stage_and_bytes():
    own = ("--learner.zero_stage", "1", "--learner.deepspeed.grad_accum_dtype", "bf16")
    found = findings(*own, path=[BASE, PAPER / "models" / "qwen2.5-7b.toml"])["learner memory"]
    assert found.status == "error"
    assert "ZeRO-1 on 4 ranks needs 80.9 of 80 GiB per GPU" in found.text
    assert "learner.zero_stage = 2 fits" in found.text


def test_memory_that_no_stage_makes_fit_has_another_advice():
    found = findings("--learner.gradient_checkpointing", "false")["learner memory"]
    assert found.status == "error"
    assert "learner.gradient_checkpointing" in found.text
    assert "learner.lora.rank" in found.text


def test_what_is_set_is_no_advice():
    offload = ("--learner.deepspeed.zero_optimization.offload_optimizer.device", "cpu")
    found = findings("--learner.gradient_checkpointing", "true", *offload, gib=8)["learner memory"]
    assert found.status == "error"
    others = "a smaller learner.micro_batch_tokens, learner.reference = 'cpu' or learner.lora.rank"
    assert found.text.endswith(f"; use more learner.ranks, {others}")


def test_memory_that_barely_fits_is_a_warning():
    assert findings(gib=34)["learner memory"].status == "warning"


def test_a_smaller_gpu_is_asked_for_on_the_command_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert run(str(BASE), "--gpu-gib", "24") == 1
    assert "fits 24" in capsys.readouterr().out


def test_a_config_says_the_memory_of_its_gpu():
    for gib in (24, 48, 80):
        device = device_of(load_config(CONFIGS / f"one-gpu-{gib}gb.toml"), None)
        assert (device.gib, device.source) == (gib, "run.gpu_gib")
    assert device_of(load_config(BASE), None).gib == 80
    assert "assumed" in device_of(load_config(BASE), None).source
    with pytest.raises(ConfigError, match=r"run\.gpu_gib"):
        load_config(BASE, ["--run.gpu_gib", "0"])


def test_the_gpu_that_is_here_counts_more_than_the_config_and_less_than_the_command_line(monkeypatch):
    import torch

    cards = [SimpleNamespace(name=f"card {gib}", total_memory=gib << 30) for gib in (80, 23, 40)]
    monkeypatch.setattr(gpus_module, "count_gpus", lambda: len(cards))
    monkeypatch.setattr(gpus_module, "is_cpu_meant", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: cards[index])
    config = load_config(CONFIGS / "one-gpu-48gb.toml")
    for gpus, gib in (("[0]", 80), ("[1]", 23), ("[2]", 40)):
        named = load_config(CONFIGS / "one-gpu-48gb.toml", ["--learner.gpus", gpus, "--rollout.gpus", gpus])
        assert device_of(named, None) == Device(gib, f"card {gib} of this machine")
        assert device_of(named, 7.0) == Device(7.0, "--gpu-gib")
    assert device_of(load_config(CONFIGS / "atlas.toml"), None).gib == 23, "the smallest, where none is named"
    far = load_config(CONFIGS / "one-gpu-48gb.toml", ["--learner.gpus", "[7]", "--rollout.gpus", "[7]"])
    assert device_of(far, None).gib == 48
    monkeypatch.setattr(gpus_module, "is_cpu_meant", lambda: True)
    assert device_of(config, None).gib == 48


@pytest.mark.parametrize(
    ("overrides", "hidden"),
    [((), False), (("--model.dtype", "bfloat16"), True), (("--model.dtype", "bfloat16"), False)],
    ids=["float32", "hidden", "cores"],
)
def test_nothing_is_said_of_gpus_for_a_run_on_a_cpu(overrides, hidden, capsys, monkeypatch):
    monkeypatch.setattr(gpus_module, "count_gpus", lambda: 0)
    monkeypatch.setattr(gpus_module, "is_cpu_meant", lambda: hidden)
    monkeypatch.setenv("COLUMNS", "160")
    assert run("atlas", overrides=overrides) == 0
    printed = capsys.readouterr().out
    assert not re.search("GPU|H100|CUDA", printed), printed
    assert re.search(r"on the CPU: ZeRO-\d on 1 rank needs \d", printed)
    assert "hold" in printed
    assert "one core trains about" in printed


@pytest.mark.parametrize(
    ("size", "status", "text"),
    [
        ("16_777_216", "ok", "0.0 GiB (rollout.vllm.kv_cache_memory_bytes) hold 4 episodes of 1016 tokens"),
        ("268_435_456", "ok", "hold 64 episodes of 1016 tokens"),
        (None, "warning", "is not set: an engine takes 30% of this machine's memory"),
    ],
)
def test_the_kv_cache_of_a_cpu_must_hold_an_episode(size, status, text, tmp_path):
    """Only that of a GPU was checked, and vLLM refused it with advice that no config takes."""
    words = (CONFIGS / "atlas.toml").read_text(encoding="utf-8")
    (tmp_path / "a.toml").write_text(words.replace("kv_cache_memory_bytes", "# kv") if size is None else words)
    config = load_config(tmp_path / "a.toml", [] if size is None else ["--rollout.vllm.kv_cache_memory_bytes", size])
    found = memory.kv_cache_on_cpu(config, shape_of(config.model))
    assert (found.status, text in found.text) == (status, True), found.text
    larger = replace(shape_of(config.model), layers=400)
    assert memory.kv_cache_on_cpu(config, larger).status == ("error" if size else status)


@pytest.mark.parametrize("gib", ["0", "-1", "nan", "inf", "big"])
def test_a_gpu_of_no_size_is_refused(gib, capsys):
    assert run(str(BASE), f"--gpu-gib={gib}") == 2
    assert "--gpu-gib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mib", "gib", "status", "text"),
    [
        (16, 80, "error", "hold 0 episodes of 8548 tokens"),
        (2000, 80, "warning", "hold 6 episodes"),
        (20000, 80, "ok", "hold 66 episodes"),
        (80000, 80, "error", "more than a GPU of 80 GiB"),
    ],
)
def test_the_kv_cache_must_hold_episodes_and_fit_with_the_weights(mib, gib, status, text):
    found = findings("--rollout.vllm.kv_cache_memory_bytes", str(mib << 20), gib=gib)["KV cache"]
    assert found.status == status
    assert text in found.text


def test_engines_over_several_gpus_are_counted_per_gpu():
    settings = ("--rollout.gpus", "[0, 1, 2, 3]", "--rollout.workers", "2", "--rollout.vllm.tensor_parallel_size")
    one, two = findings()["KV cache"], findings(*settings, "2")["KV cache"]
    assert "with 5.7 GiB of weights" in one.text
    assert "36864 bytes per token" in one.text
    assert "with 2.9 GiB of weights" in two.text
    assert "18432 bytes per token" in two.text
    three = findings("--rollout.workers", "1", *settings[:2], settings[-1], "3")["KV cache"]
    assert three.status == "error"
    assert "tensor_parallel_size = 3 does not divide the 16 attention heads and 2 key heads" in three.text


def test_an_engines_share_of_its_gpu_is_read():
    whole, half = findings()["KV cache"], findings("--rollout.vllm.gpu_memory_utilization", "0.5")["KV cache"]
    assert "63.9 GiB with" in whole.text
    assert "30.3 GiB with" in half.text


def test_weights_that_do_not_fit_with_vllm_leave_no_kv_cache():
    found = findings(gib=8)["KV cache"]
    assert found.status == "error"
    assert "0.0 GiB" in found.text


# What it says.


def test_the_batch_is_said_with_its_singletons():
    found = findings()
    assert "K = 96 of 192 trajectories per step (64 questions x 3): 3 updates of at most M = 32" in found["batch"].text
    assert "25% of the selected" in found["singletons"].text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("grpo_full", "up to 192 of 192 trajectories per step (64 questions x 3): 6 updates"),
        ("grpo_half", "up to 96 of 96 trajectories per step (32 questions x 3): 3 updates"),
    ],
)
def test_methods_that_train_on_whole_groups_have_no_singletons(name, text):
    found = findings(path=[BASE, PAPER / "methods" / f"{name}.toml"])
    assert text in found["batch"].text
    assert "singletons" not in found


def test_a_warm_up_that_is_longer_than_the_run_is_a_warning():
    """Step W - 1 of a warm-up of W steps has learner.lr."""
    for steps in ("10", "0"):
        assert "learner.warmup_steps" not in findings("--learner.warmup_steps", "10", "--run.steps", steps)
    found = findings("--learner.warmup_steps", "11", "--run.steps", "10")["learner.warmup_steps"]
    assert (found.status, "never reaches learner.lr" in found.text) == ("warning", True)


def test_ranks_without_work_are_a_warning():
    overrides = ("--learner.ranks", "40", "--learner.gpus", "[]", "--rollout.gpus", "[]")
    found = findings(*overrides)["batch"]
    assert found.status == "warning"
    assert "8 of 40 ranks (learner.ranks) will be idle" in found.text


@pytest.mark.parametrize(
    ("workers", "episodes", "bound", "slow"), [(1, 192, 2, 1.0), (4, 192, 2, 2.0), (1, 96, 8, 0.5), (4, 192, 0, 0.0)]
)
def test_staleness_goes_with_what_is_in_flight_up_to_the_bound(workers, episodes, bound, slow):
    settings = {"rollout.workers": workers, "rollout.max_episodes": episodes, "pool.max_staleness": bound}
    overrides = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    config = load_config(BASE, [*overrides, "--learner.publish_every", "1"])
    text = workload.staleness(config).text
    assert f"about {slow} steps if the workers are slower, {bound}.0 if the learner is slower" in text
    assert f"{workers * episodes / 192:.1f} steps' worth, and {bound + 2}.0 steps' worth may be buffered" in text


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("--pool.order", "ticket"), "never above 2"),
        (("--pool.order", "deferred", "--pool.defer", "5"), "never above 7"),
        (("--pool.order", "oldest_complete"), "without a bound"),
    ],
)
def test_the_bound_of_staleness_is_that_of_the_order(overrides, said):
    assert said in workload.staleness(load_config(BASE, overrides)).text


def test_a_model_that_is_unknown_here_is_said_and_no_error():
    found = findings("--model.path", "nobody/has-this-model")
    assert found["longest episode"].status == "not reachable"
    assert found["tokenizer"].status == "not reachable"
    assert "learner memory" not in found
    assert run(str(BASE), overrides=("--model.path", "nobody/has-this-model")) == 0


def test_a_path_that_is_neither_folder_nor_hub_id_is_said():
    assert "or a Hub id" in findings("--model.path", "/no/such/folder")["tokenizer"].text


def test_gpus_that_are_not_here_are_said_and_no_error():
    found = findings("--learner.gpus", "[400, 401, 402, 403]")["GPUs here"]
    assert (found.status, "400, 401, 402, 403 of learner.gpus" in found.text) == ("not reachable", True)
    overrides = ("--retriever.backend", "dense", "--retriever.dense.device", "cuda:99", "--learner.gpus", "[]")
    found = findings(*overrides, "--rollout.gpus", "[]")["GPUs here"]
    assert (found.status, "99 of" in found.text) == ("not reachable", True)


def test_more_trained_layers_than_the_model_has_are_an_error():
    """Before, launch ended 40 s later."""
    found = findings("--model.path", "atlas", "--learner.trained_layers", "10", path=Path("atlas"))
    assert found["learner.trained_layers"].status == "error"
    assert "learner.trained_layers (10) must be <= 4, the layers of" in found["learner.trained_layers"].text
