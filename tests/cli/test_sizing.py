"""Estimates from a model's shape: against real models made here, published totals, and numbers worked by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig, T5Config

from cusearch_async.cli.preflight import memory as preflight_memory
from cusearch_async.cli.preflight import sizing
from cusearch_async.cli.preflight.activations import passes
from cusearch_async.cli.preflight.shapes import PUBLISHED, ModelShape, published, read_shape
from cusearch_async.cli.preflight.sizing import GIB
from cusearch_async.config import STARTER, Config, load_config
from cusearch_async.learner.model import BLOCKS, SampledLogprobs, recompute_layers, train_upper_layers

pytestmark = pytest.mark.system  # it builds models of transformers, which takes long

CONFIGS = Path(__file__).parents[2] / "configs"
QWEN_3B = published("Qwen/Qwen2.5-3B")
QWEN_7B = published("Qwen/Qwen2.5-7B")
TINY = {
    "hidden_size": 256,
    "intermediate_size": 700,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 300,
    "max_position_embeddings": 640,
    "pad_token_id": None,
}
MOE = {"num_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2, "head_dim": 32}


def written(config, folder: Path) -> ModelShape:
    """The shape that is read back from a config's folder."""
    config.save_pretrained(folder)
    shape = read_shape(str(folder))
    assert shape is not None
    return shape


def real_model(config, dtype: str = "float32"):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval()


# Shapes.


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**TINY),
        LlamaConfig(**TINY, head_dim=48, attention_bias=True, mlp_bias=True),
        Qwen3MoeConfig(**TINY, **MOE),
    ],
    ids=["qwen2", "llama with wide heads and biases", "experts"],
)
def test_parameters_are_those_of_a_real_model(config, tied, tmp_path):
    config.tie_word_embeddings = tied
    shape = written(config, tmp_path)
    assert (shape.tied, shape.context, shape.layers, shape.kv_heads) == (tied, 640, 4, 2)
    assert shape.parameters == real_model(config).num_parameters()


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("Qwen/Qwen2.5-0.5B", 494.0),
        ("Qwen/Qwen2.5-1.5B", 1543.7),
        ("Qwen/Qwen2.5-3B", 3085.9),
        ("Qwen/Qwen2.5-7B", 7615.6),
        ("Qwen/Qwen3-0.6B", 596.0),
        ("Qwen/Qwen3-1.7B", 1720.6),
        ("Qwen/Qwen3-4B", 4022.5),
        ("Qwen/Qwen3-8B", 8190.7),
        ("meta-llama/Llama-3.2-3B", 3212.7),
    ],
)
def test_parameters_are_the_published_totals(name, millions):
    assert published(name).parameters == pytest.approx(millions * 1e6, rel=1e-4)
    assert name in PUBLISHED


def test_the_starters_shape_is_read_from_its_folder():
    shape = read_shape(str(STARTER))
    assert shape is not None
    assert (shape.layers, shape.hidden, shape.kv_heads, shape.head_dim, shape.context) == (4, 128, 4, 32, 1024)


@pytest.mark.parametrize("path", ["nobody/has-this-model", "/no/such/folder", "not a name at all", ""])
def test_a_model_that_is_not_here_has_no_shape(path):
    assert read_shape(path) is None
    assert published(path) is None


def test_a_model_that_is_no_causal_lm_has_no_shape(tmp_path):
    T5Config().save_pretrained(tmp_path)
    assert read_shape(str(tmp_path)) is None


def test_a_folder_without_a_config_has_no_shape(tmp_path):
    assert read_shape(str(tmp_path)) is None


# The learner.


OWN_GRADIENTS = ("--learner.deepspeed.grad_accum_dtype", "bf16")
"""Added up as the model's, not in float32 as in the paper's config."""


def config_of(*overrides: str, dtype: str = "bfloat16", ranks: int = 4) -> Config:
    changes = ("--model.dtype", dtype, "--learner.ranks", str(ranks), "--learner.gpus", "[]", *OWN_GRADIENTS)
    return load_config(CONFIGS / "paper" / "base.toml", [*changes, *overrides])


def memory(*overrides: str, shape=QWEN_3B, stage=1, tokens=1000, **changes):
    return sizing.learner_memory(shape, config_of(*overrides, **changes), tokens, stage)


@pytest.mark.parametrize(
    ("stage", "weights", "optimizer", "gradients", "reference"),
    [(0, 2, 12, 2, 2), (1, 2, 3, 2, 2), (2, 2, 3, 0.5, 2), (3, 0.5, 3, 0.5, 0.5)],
)
def test_each_zero_stage_divides_one_thing_more(stage, weights, optimizer, gradients, reference):
    """In bytes per parameter, bfloat16 on 4 ranks."""
    found, parameters = memory(stage=stage), QWEN_3B.parameters
    assert found.weights / parameters == pytest.approx(weights)
    assert found.optimizer / parameters == pytest.approx(optimizer)
    assert found.gradients / parameters == pytest.approx(gradients)
    assert found.reference / parameters == pytest.approx(reference)
    assert found.host == 0


@pytest.mark.parametrize(("stage", "optimizer", "step"), [(0, 8, 4), (1, 12, 8)])
def test_plain_adamw_in_float32_needs_no_masters(stage, optimizer, step):
    found = memory(dtype="float32", stage=stage, ranks=1)
    assert (found.optimizer, found.step) == (optimizer * QWEN_3B.parameters, step * QWEN_3B.parameters)


@pytest.mark.parametrize("tied", [True, False])
def test_only_what_is_trained_has_gradients_masters_and_moments(tied, tmp_path):
    """Counted in the model itself, with the layers that `train_upper_layers` leaves."""
    qwen = Qwen2Config(**TINY, tie_word_embeddings=tied)
    model, shape = real_model(qwen), written(qwen, tmp_path)
    train_upper_layers(model, 3, "")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    config = load_config(Path("atlas"), ["--model.path", str(tmp_path), "--learner.trained_layers", "3"])
    assert sizing.trained_parameters(shape, config.learner) == pytest.approx(trained, abs=TINY["hidden_size"])
    memory = sizing.learner_memory(shape, config, 100)
    assert memory.gradients == 4 * sizing.trained_parameters(shape, config.learner)
    assert memory.weights == 4 * shape.parameters


def test_a_reference_is_there_only_for_a_kl_term():
    without = memory("--loss.kl_coef", "0")
    assert memory().held - without.held == 2 * QWEN_3B.parameters
    assert without.reference == 0


OFFLOAD = "--learner.deepspeed.zero_optimization.offload_"


def test_what_is_offloaded_is_in_the_hosts_memory():
    """In bytes per parameter, one rank."""
    parameters = QWEN_3B.parameters
    found = memory(f"{OFFLOAD}optimizer.device", "cpu", ranks=1)
    assert (found.optimizer, found.step, found.host) == (0, 0, (12 + 4 + 2 + 2) * parameters)
    of_float32 = ("--learner.deepspeed.grad_accum_dtype", "fp32", "--learner.zero_stage", "2")
    found = memory(f"{OFFLOAD}optimizer.device", "cpu", *of_float32, stage=2, ranks=1)
    assert (found.gradients, found.step, found.host) == (4 * parameters, 0, (12 + 4 + 2) * parameters)
    found = memory(f"{OFFLOAD}param.device", "cpu", "--learner.zero_stage", "3", stage=3, ranks=1)
    assert (found.weights, found.host) == (0, 2 * parameters)


def test_a_reference_that_waits_on_the_host_comes_for_its_pass():
    here, waits = memory(), memory("--learner.reference", "cpu")
    assert (waits.reference, waits.host) == (0, 2 * QWEN_3B.parameters)
    assert waits.scoring - here.scoring == 2 * QWEN_3B.parameters
    divided = memory("--learner.reference", "cpu", stage=3)
    assert (divided.reference, divided.host) == (0, QWEN_3B.parameters // 2)
    assert divided.scoring == here.scoring, "it comes layer by layer, as the policy does"


def test_deepspeeds_options_are_read():
    parameters = QWEN_3B.parameters
    of_float32 = memory("--learner.deepspeed.grad_accum_dtype", "fp32", "--learner.zero_stage", "2", stage=2)
    assert of_float32.gradients == parameters, "4 bytes on each of 4 ranks"
    bucket = "--learner.deepspeed.zero_optimization.reduce_bucket_size"
    assert memory().buffers - memory(bucket, "100000000").buffers == 2 * 400_000_000


def test_the_peak_has_the_step_or_a_pass_but_not_both():
    found = memory("--learner.gradient_checkpointing", "false", tokens=16384)
    assert found.activations > found.step
    assert found.peak == found.held + found.activations + sizing.DEVICE_ALLOWANCE
    found = memory(shape=QWEN_7B, tokens=100)
    assert found.step > found.activations
    assert found.peak == found.held + found.step + sizing.DEVICE_ALLOWANCE


def test_each_zero_stage_takes_less_than_the_one_before():
    peaks = [memory(shape=QWEN_7B, stage=stage).peak for stage in range(4)]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4


def allocated_peak(run) -> int:
    """Most bytes that torch's allocator on the CPU has given out at a time while `run` ran."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    return int(np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]).max())


SHAPES = {
    "wide": Qwen2Config(**TINY | {"vocab_size": 9000}, tie_word_embeddings=True),
    "deep": Qwen3Config(**TINY | {"num_hidden_layers": 9}, head_dim=32, tie_word_embeddings=False),
    "heavy": LlamaConfig(**TINY | {"hidden_size": 512, "intermediate_size": 1800}, tie_word_embeddings=True),
}


@pytest.mark.system
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.slow), "float32"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_pass_takes_what_the_allocator_gives(name, dtype, checkpointing, tmp_path):
    tokens, at_once = 512, 200
    expected = passes(written(SHAPES[name], tmp_path), dtype, tokens, checkpointing, at_once)
    model = real_model(SHAPES[name], dtype)
    if checkpointing:
        recompute_layers(model)
    module = SampledLogprobs(model, at_once)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    token_ids, sampled = torch.zeros(2, tokens // 2, dtype=torch.long), torch.arange(1, tokens)

    def train() -> None:
        module(token_ids, sampled, 1.0)[0].sum().backward()

    def score() -> None:
        with torch.no_grad():
            module(token_ids, sampled, 1.0, wants_entropy=False)

    assert expected.training == pytest.approx(allocated_peak(train), rel=0.1)
    assert expected.scoring == pytest.approx(allocated_peak(score), rel=0.1)


def test_logits_of_one_piece_are_counted_and_in_float32_those_of_a_few_rows():
    shallow = QWEN_3B.config.to_dict() | {"num_hidden_layers": 2, "layer_types": None}  # the logits decide
    model = replace(QWEN_3B, config=type(QWEN_3B.config)(**shallow))
    few, many = (passes(model, "bfloat16", 4096, True, at_once) for at_once in (1024, 2048))
    count = 151936 * 1024
    assert many.scoring - few.scoring == pytest.approx((2 + 8 / BLOCKS) * count, rel=0.01)
    bonus = passes(model, "bfloat16", 4096, True, 1024, bonus=True)
    assert few.training <= bonus.training < few.training + 2 * count


@pytest.mark.parametrize(
    ("micro", "minibatch", "ranks", "expected"),
    [(16384, 32, 4, 16384), (1024, 32, 4, 8548), (10**6, 32, 4, 8 * 8548), (10**6, 96, 5, 20 * 8548)],
    ids=["full micro-batch", "one long trajectory", "a rank's share", "an uneven share"],
)
def test_the_largest_forward_pass(micro, minibatch, ranks, expected):
    changes = ("--learner.micro_batch_tokens", str(micro), "--loss.minibatch", str(minibatch))
    assert sizing.forward_tokens(config_of(*changes, ranks=ranks)) == expected


# The host.


def test_the_hosts_memory_is_that_of_all_ranks():
    """Qwen2.5-3B in bfloat16: two models a rank while they load; a checkpoint is copied before it is written."""
    parameters = QWEN_3B.parameters
    loading, held, writing = sizing.host_bytes(QWEN_3B, config_of())
    assert (loading, held) == (4 * 2 * 2 * parameters, 0)
    assert writing == sizing.checkpoint_bytes(QWEN_3B, config_of())
    offloaded = sizing.host_bytes(QWEN_3B, config_of(f"{OFFLOAD}optimizer.device", "cpu", ranks=1))
    assert offloaded[1:] == (20 * parameters, 20 * parameters + writing)
    two = sizing.host_bytes(QWEN_3B, config_of("--learner.nodes", "2"))
    assert writing - two[2] == 6 * parameters, "half of masters and moments are on the other node"
    divided, _, _ = sizing.host_bytes(QWEN_3B, config_of("--learner.zero_stage", "3"))
    assert divided == 2 * 2 * (parameters + 4 * 151936 * 2048), "the embedding is the largest parameter"


def test_on_a_cpu_the_copy_of_a_checkpoint_is_beside_the_update(monkeypatch):
    """The kernel ended the learner at its first checkpoint, after `check` had said ok."""
    monkeypatch.setattr(preflight_memory, "_in_memory", lambda what, text, needed: needed)
    config = config_of("--learner.zero_stage", "1")
    needed = preflight_memory.memory_on_cpu(config, QWEN_3B)
    monkeypatch.setattr(sizing, "copied_bytes", lambda *_: 0)
    alone = preflight_memory.memory_on_cpu(config, QWEN_3B)
    assert needed - alone == sizing.checkpoint_bytes(QWEN_3B, config) > 16 * GIB


def test_an_engine_on_a_cpu_holds_two_models_while_it_loads(monkeypatch):
    """The kernel ended the worker at its first new version, after `check` had said ok."""
    monkeypatch.setattr(preflight_memory, "_in_memory", lambda what, text, needed: needed)
    configs = [config_of(), config_of("--learner.lora.rank", "8")]
    needed, lora = (preflight_memory.memory_on_cpu(config, QWEN_3B) for config in configs)
    monkeypatch.setattr(sizing, "version_bytes", lambda *_: 0)
    alone, lora_alone = (preflight_memory.memory_on_cpu(config, QWEN_3B) for config in configs)
    version = 2 * (QWEN_3B.parameters + QWEN_3B.vocab * QWEN_3B.hidden)
    assert needed - alone == sizing.engines(configs[0]) * version
    assert lora == lora_alone


def test_each_process_of_an_engine_keeps_a_block_for_new_weights():
    """Qwen2.5-7B: 14.2 GiB are 16 of them page-locked; `check` said 0.0 GiB permanently."""
    shape, flags = published("Qwen/Qwen2.5-7B"), ("--rollout.workers", "4")
    assert sizing.staged_bytes(shape, config_of(*flags)) == 4 * 16 * GIB
    split = config_of(*flags, "--rollout.vllm.tensor_parallel_size", "2", "--eval.every", "10")
    assert sizing.staged_bytes(shape, split) == 5 * 2 * 16 * GIB
    assert sizing.staged_bytes(shape, config_of(*flags, "--learner.lora.rank", "8")) == 0


# Rollout workers.


@pytest.mark.parametrize(
    ("name", "expected"), [("Qwen/Qwen2.5-3B", 36864), ("Qwen/Qwen2.5-7B", 57344), ("meta-llama/Llama-3.2-3B", 114688)]
)
def test_kv_bytes_per_token(name, expected):
    """Keys and values x layers x kv heads x 128 x 2 bytes, as 2 x 36 x 2 x 128 x 2."""
    assert sizing.kv_bytes_per_token(published(name), config_of()) == expected
    assert sizing.kv_bytes_per_token(published(name), config_of(dtype="float32")) == 2 * expected
    assert sizing.kv_bytes_per_token(published(name), config_of("--rollout.vllm.kv_cache_dtype", "fp8")) == expected / 2


def test_the_kv_cache_gets_what_weights_leave_of_vllms_share():
    room = sizing.kv_room(QWEN_7B, config_of(), 80 * GIB)
    assert room == pytest.approx((0.92 * 80 - 4) * GIB - 2 * 7_615_616_512)
    assert sizing.kv_room(QWEN_7B, config_of(), 16 * GIB) < 0


def test_a_quantised_engine_has_weights_of_a_byte_but_for_embedding_and_head():
    room = sizing.kv_room(QWEN_7B, config_of("--rollout.vllm.quantization", "fp8"), 20 * GIB)
    embeddings = 2 * 152064 * 3584
    assert room == pytest.approx((0.92 * 20 - 4) * GIB - 7_615_616_512 - embeddings)
    whole = sizing.kv_room(QWEN_7B, config_of(), 20 * GIB)
    assert sizing.kv_room(QWEN_7B, config_of("--rollout.vllm.quantization", "mine"), 20 * GIB) == whole


# The batch.


def test_the_papers_batch_leaves_a_quarter_alone():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(64), 3)
    chosen = [np.bincount(rng.permutation(groups)[:96]) for _ in range(2000)]
    measured = np.mean([(counts == 1).sum() / 96 for counts in chosen])
    assert sizing.singleton_share(64, 3, 96) == pytest.approx(measured, abs=0.005)
    assert sizing.singleton_share(64, 3, 96) == pytest.approx(0.2513, abs=1e-4)


@pytest.mark.parametrize(("rollouts", "budget", "expected"), [(3, 192, 0.0), (1, 10, 1.0), (3, 1, 1.0)])
def test_singletons_at_the_ends(rollouts, budget, expected):
    assert sizing.singleton_share(64, rollouts, budget) == expected


# The page's table.


def fits(line: str) -> tuple[str, list[float]]:
    """The first cells of a row, and its figures."""
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    return cells[1], [float(cell) for cell in cells[3:]]


@pytest.mark.slow
def test_the_pages_table_of_what_fits_is_what_check_computes():
    text = (CONFIGS.parent / "docs" / "gpu.md").read_text(encoding="utf-8")
    rows = text.split("| config | model |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(rows) == 6
    for row in rows:
        files = row.strip("|").split("|")[0].strip(" `").split()
        config = load_config([CONFIGS / f"{file}.toml" for file in files])
        model, figures = fits(row)
        assert model == config.model.path.rpartition("/")[2]
        shape = published(config.model.path)
        memory = sizing.learner_memory(shape, config, sizing.forward_tokens(config))
        written = sizing.checkpoint_bytes(shape, config)
        host = max(sizing.host_bytes(shape, config)) + sizing.staged_bytes(shape, config)
        computed = (memory.peak, host, written)
        assert figures == [round(size / GIB, 1) for size in computed], row
