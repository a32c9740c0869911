"""The learner on DeepSpeed: resuming is bit-identical, and how a batch is divided does not matter."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Glm4MoeConfig, GraniteConfig

from cusearch_async.config import STARTER
from cusearch_async.learner.batching import shares
from cusearch_async.learner.model import load_causal_lm
from cusearch_async.models import load_tokenizer
from tests.conftest import SLOW, free_port
from tests.system.forked import Forked
from tests.system.learner_script import fixed_trajectories, with_copies

pytestmark = pytest.mark.system

SETTINGS = ("--loss.minibatch", "4", "--method.budget", "8", "--learner.lr", "1e-3", "--learner.grad_clip", "100")
VARLEN = ("--learner.packing", "true", "--learner.attention", "varlen")
LONG = (17, 900)
"""Trajectories, and the most tokens that one has sampled."""


def train(
    folder: Path,
    name: str,
    *arguments: str,
    ranks: int = 1,
    settings: tuple[str, ...] = (),
    refused: bool = False,
    status: int = 0,
) -> Any:
    """Run learner_script.py; returns the weights it ends with, or its output if it is to end with another `status`.
    `refused`: other ranks than 0 end with an error."""
    script = ["tests.system.learner_script", str(folder), name, *arguments]
    command = [*script, *SETTINGS, "--learner.ranks", str(ranks), *settings]
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    running = [
        Forked(command, folder / f"{name}-{rank}.log", shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    for rank, process in enumerate(running):
        output, _ = process.communicate(timeout=180 * SLOW)
        assert process.returncode == (1 if refused and rank else status), output
    if status:
        return output
    return {} if refused else load_file(folder / f"weights-{name}.safetensors")


UPPER = ("--learner.trained_layers", "2")


@pytest.mark.parametrize(
    ("stage", "dtype", "more"),
    [
        ("0", "float32", ()),
        ("3", "bfloat16", ()),
        pytest.param("1", "float32", UPPER, marks=pytest.mark.slow),
        ("3", "float32", UPPER),
    ],
)
def test_a_resumed_learner_makes_the_same_updates_bit_for_bit(tmp_path, stage, dtype, more):
    settings = ("--learner.zero_stage", stage, "--model.dtype", dtype, *more)
    whole = train(tmp_path, "whole", "--to-step", "2", settings=settings)
    train(tmp_path, "first", "--to-step", "1", "--save", str(tmp_path / "checkpoint"), settings=settings)
    arguments = ("--from-step", "1", "--to-step", "2", "--load", str(tmp_path / "checkpoint"))
    resumed = train(tmp_path, "resumed", *arguments, settings=settings)
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    if more:
        old = load_file(STARTER / "model.safetensors")
        changed = {name for name in old if not torch.equal(old[name].to(whole[name].dtype), whole[name])}
        assert {name.split("layers.")[1][0] for name in changed if "layers." in name} == {"2", "3"}
        assert {name for name in changed if "layers." not in name} == {"model.norm.weight"}


class Planted:
    """Pickled by who can write into a run's folder; unpickled it makes a file."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.made,)


def test_a_checkpoint_is_loaded_without_running_what_is_in_it(tmp_path):
    checkpoint, made = tmp_path / "checkpoint", tmp_path / "made"
    train(tmp_path, "first", "--to-step", "1", "--save", str(checkpoint))
    states = checkpoint / "deepspeed" / "rank0.safetensors"
    torch.save({"planted": Planted(made)}, states)
    torch.load(io.BytesIO(states.read_bytes()), weights_only=False)
    assert made.exists(), "what is planted does run where it is unpickled"
    made.unlink()
    output = train(tmp_path, "second", "--load", str(checkpoint), status=1)
    assert not made.exists()
    assert f"checkpoint {checkpoint} is no learner's, or damaged" in output


def test_a_checkpoint_of_another_model_is_named(tmp_path):
    checkpoint, other = tmp_path / "checkpoint", tmp_path / "other"
    train(tmp_path, "first", "--to-step", "1", "--save", str(checkpoint))
    model = load_causal_lm(str(STARTER), "float32")
    model.config.intermediate_size += 32
    for part in (AutoModelForCausalLM.from_config(model.config), AutoTokenizer.from_pretrained(STARTER)):
        part.save_pretrained(other)
    said = train(tmp_path, "second", "--load", str(checkpoint), settings=("--model.path", str(other)), status=1)
    assert f"checkpoint {checkpoint} is not of this model.path: model." in said


def test_a_checkpoint_that_another_learner_has_deleted_meanwhile_is_named(tmp_path):
    """What a learner that is still alive does to the one that its successor is about to load: first its state goes."""
    (tmp_path / "step000010-e1" / "deepspeed").mkdir(parents=True)
    output = train(tmp_path, "late", "--load", str(tmp_path / "step000010-e1"), status=1)
    assert "ConfigError: checkpoint" in output
    assert "step000010-e1 was deleted meanwhile: another learner of this run is alive" in output


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank, whole mini-batches: the update that every division must reproduce."""
    folder = tmp_path_factory.mktemp("plain")
    train(folder, "plain")
    return folder


def gradient(folder: Path, name: str) -> torch.Tensor:
    tensors = load_file(folder / f"gradient-{name}.safetensors")
    return torch.cat([tensors[key].double().flatten() for key in sorted(tensors)])


def flat(report: dict[str, Any]) -> dict[str, float]:
    """A report with the entries of its lists one by one, those of empty depths left out."""
    rows = {name: value if isinstance(value, list) else [value] for name, value in report.items()}
    return {f"{name}/{i}": v for name, values in rows.items() for i, v in enumerate(values) if v is not None}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_that_are_lent_change_only_when_they_are_given_back(tmp_path: Path, stage: int):
    """They are copied for the workers while the next gradient is computed. ZeRO-3, which lends copies, waited, too."""
    settings = ("--learner.zero_stage", str(stage))
    lent = train(tmp_path, "lent", "--lend", "0.5", settings=settings)
    plain = train(tmp_path, "plain", settings=settings)
    assert all(torch.equal(lent[name], plain[name]) for name in plain)


def test_weights_may_be_lent_for_longer_than_a_collective_may_take(tmp_path: Path):
    """The others waited for rank 0 in the optimizer step's: a disk of 20 MB/s ended a learner of 7 B parameters."""
    settings = ("--learner.zero_stage", "1", "--learner.collective_timeout_s", "8")
    train(tmp_path, "lent", "--lend", "10", "--to-step", "1", settings=settings, ranks=2)


def test_a_step_of_27_mib_is_trained_by_two_ranks_as_by_one(tmp_path):
    """Three times the largest step of a shipped config. Before, 8 MiB ended the learner, after every restart again."""
    size = ("--trajectories", "32", "20", "--question-kib", str(27 * 1024 // 32), "--to-step", "1")
    for name, ranks in (("one", 1), ("two", 2)):
        train(tmp_path, name, *size, ranks=ranks)
    one, two = gradient(tmp_path, "one"), gradient(tmp_path, "two")
    assert (one - two).norm() < 3e-6 * one.norm()


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, ("--learner.micro_batch_tokens", "1")),
        (1, ("--learner.packing", "true")),
        (1, ("--learner.micro_batch_tokens", "150", *VARLEN)),
        (1, ("--learner.zero_stage", "0")),
        (2, ("--learner.zero_stage", "0")),
        (2, ("--learner.zero_stage", "1")),
        (2, ("--learner.zero_stage", "2", "--learner.micro_batch_tokens", "64")),
        (2, ("--learner.zero_stage", "3")),
        (1, ("--learner.zero_stage", "0", *VARLEN)),
        (2, ("--learner.zero_stage", "2", "--learner.micro_batch_tokens", "64", *VARLEN)),
        (2, ("--learner.zero_stage", "3", "--learner.gradient_checkpointing", "true", *VARLEN)),
    ],
)
def test_the_update_does_not_depend_on_how_the_batch_is_divided(tmp_path, plain, ranks, settings):
    divided = train(tmp_path, "divided", ranks=ranks, settings=settings)
    whole_gradient, divided_gradient = gradient(plain, "plain"), gradient(tmp_path, "divided")
    assert whole_gradient.abs().max() > 0.05
    assert (whole_gradient - divided_gradient).abs().max() < 1e-6
    assert (whole_gradient - divided_gradient).norm() < 3e-6 * whole_gradient.norm()

    start, weights = load_file(STARTER / "model.safetensors"), load_file(plain / "weights-plain.safetensors")
    moved = torch.cat([(weights[name] - start[name].float()).flatten() for name in weights])
    moved_divided = torch.cat([(divided[name] - start[name].float()).flatten() for name in weights])
    assert moved.norm() > 0.1
    # Adam divides by the gradient's size, so rounding shows only where the gradient is next to nothing.
    assert (moved - moved_divided).norm() < 5e-3 * moved.norm()

    report, divided_report = (
        flat(json.loads(path.read_text())) for path in (plain / "report-plain.json", tmp_path / "report-divided.json")
    )
    assert report.keys() ^ divided_report.keys() <= {"train/grad_norm/0"}, "DeepSpeed keeps none at stage 0"
    for name in report.keys() & divided_report.keys() - {"train/padding_share/0"}:
        assert divided_report[name] == pytest.approx(report[name], rel=2e-3, abs=1e-5), name


@pytest.mark.parametrize(
    ("minibatch", "checkpointing", "proximal", "passes"),
    [
        (10, "false", "recomputed", 1),
        (10, "true", "recomputed", 2),
        (5, "true", "recomputed", 5),
        (5, "false", "loglinear", 2),
    ],
)
def test_each_layer_is_computed_as_often_as_it_must_be(tmp_path, plain, minibatch, checkpointing, proximal, passes):
    """For each mini-batch once for π_θ, and with gradient checkpointing once more in the backward pass; for each but
    the first once for π_prox, if that is recomputed."""
    settings = ("--loss.minibatch", str(minibatch), "--method.budget", "10", "--loss.kl_coef", "0", *VARLEN)
    settings += ("--learner.gradient_checkpointing", checkpointing, "--loss.proximal", proximal)
    train(tmp_path, "learner", "--to-step", "1", settings=settings)
    assert json.loads((tmp_path / "forwards-learner.json").read_text()) == [passes] * 4


@pytest.fixture
def wide(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The starter policy with so large a vocabulary that ZeRO-3 really divides its LM head among the ranks."""
    folder = str(tmp_path / request.param)
    model = AutoModelForCausalLM.from_pretrained(STARTER)
    model.resize_token_embeddings(1024, mean_resizing=False)
    if request.param == "tied":
        model.lm_head.weight = model.model.embed_tokens.weight
        model.config.tie_word_embeddings = True
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(STARTER).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("wide", "checkpointing"), [("untied", "false"), ("tied", "true")], indirect=["wide"])
def test_ranks_with_different_numbers_of_pieces_of_logits_agree_under_zero_3(tmp_path, wide, checkpointing):
    """Both must gather the LM head equally often."""
    selected, _ = fixed_trajectories(*LONG)
    lengths = [len(t.token_ids) for t in selected]
    loads = [sum(len(selected[i].logprobs) for i in share) for share in shares(lengths, 2)]
    assert max(loads) > 4096 >= min(loads)
    settings = ("--loss.minibatch", str(LONG[0]), "--method.budget", str(LONG[0]), "--learner.zero_stage", "3")
    settings += ("--learner.gradient_checkpointing", checkpointing, "--model.path", wide)
    settings += ("--learner.micro_batch_tokens", "16384", "--learner.logits_chunk_tokens", "4096", *VARLEN)
    arguments = ("--to-step", "1", "--trajectories", *map(str, LONG))
    one = train(tmp_path, "one", *arguments, settings=settings)
    two = train(tmp_path, "two", *arguments, ranks=2, settings=settings)
    assert torch.equal(one["lm_head.weight"], one["model.embed_tokens.weight"]) == ("/tied" in wide)
    assert one.keys() == two.keys()
    of_one, of_two = gradient(tmp_path, "one"), gradient(tmp_path, "two")
    assert of_one.abs().max() > 1e-3
    assert (of_one - of_two).norm() < 3e-6 * of_one.norm()
    reports = [flat(json.loads((tmp_path / f"report-{name}.json").read_text())) for name in ("one", "two")]
    assert reports[1]["train/loss/0"] == pytest.approx(reports[0]["train/loss/0"], rel=1e-4, abs=1e-7)
    assert reports[1]["train/tokens/0"] == sum(loads)


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, ("--loss.entropy_coef", "0.5", "--loss.minibatch", "18", "--episode.temperature", "0.7")),
        pytest.param(1, ("--loss.minibatch", "18"), marks=pytest.mark.slow),
        (1, ("--loss.minibatch", "18", "--learner.micro_batch_tokens", "100", "--learner.packing", "true")),
        (2, ("--loss.minibatch", "18", "--learner.zero_stage", "3", "--learner.micro_batch_tokens", "100")),
        pytest.param(
            1,
            ("--loss.minibatch", "18", "--learner.compile", "true", "--learner.micro_batch_tokens", "100"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_gradient_is_that_of_every_single_trajectory_by_itself(tmp_path, ranks, settings):
    """r = 1 in the first mini-batch: -1/T Σ (w A ∇ log π + η ∇ H) over all sampled tokens, by autograd of the model
    itself, one row after the other, some of which have the same tokens, and some no advantage."""
    shared = ("--method.budget", "18", "--loss.kl_coef", "0")
    train(tmp_path, "learner", "--to-step", "1", "--copies", ranks=ranks, settings=(*shared, *settings))
    entropy_coef = 0.5 if "--loss.entropy_coef" in settings else 0.0
    temperature = 0.7 if "--episode.temperature" in settings else 1.0
    model = load_causal_lm(str(STARTER), "float32").double().eval()
    selected, advantages = with_copies(*fixed_trajectories())
    total = sum(len(t.logprobs) for t in selected)
    of_rows = [(row, advantage) for one, advantage in zip(selected, advantages, strict=True) for row in one.rows]
    assert len(of_rows) == len(selected) + 2
    for row, advantage in of_rows:
        ids = torch.tensor(row.token_ids[None].astype(np.int64))
        log_all = torch.log_softmax(model(ids).logits[0, :-1] / temperature, -1)
        sampled = torch.tensor(row.sampled[1:])
        chosen = log_all.gather(-1, ids[0, 1:, None]).squeeze(-1)[sampled]
        entropy = -(log_all.exp() * log_all).sum(-1)[sampled]
        weight = (chosen.detach() - torch.tensor(row.logprobs)).exp().clamp(max=2)
        (-(advantage * (weight * chosen).sum() + entropy_coef * entropy.sum()) / total).backward()
    expected = {f"model.{name}": p.grad.double().flatten() for name, p in model.named_parameters()}
    wanted = torch.cat([expected[name] for name in sorted(expected)])
    found = gradient(tmp_path, "learner")
    assert wanted.abs().max() > 0.01
    assert (found - wanted).norm() < 2e-5 * wanted.norm(), "float32 against float64"


def test_a_model_that_the_learner_would_get_wrong_is_refused_at_its_start(tmp_path):
    tokenizer = load_tokenizer(str(STARTER))
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = GraniteConfig(vocab_size=len(tokenizer), num_key_value_heads=2, logits_scaling=8.0, **shape)
    for part in (tokenizer, AutoModelForCausalLM.from_config(config)):
        part.save_pretrained(tmp_path / "granite")
    said = train(tmp_path, "granite", settings=("--model.path", str(tmp_path / "granite")), status=1)
    assert f"model.path '{tmp_path}/granite' cannot be trained: log-probabilities of its own forward pass" in said


@pytest.mark.parametrize(
    ("poison", "ranks", "named"),
    [
        ("weight", 1, "log-probabilities of trajectory 0:0"),
        ("gradient", 1, "the gradient"),
        ("gradient", 2, "the gradient"),
    ],
)
def test_a_step_that_is_not_finite_never_reaches_the_optimizer(tmp_path, poison, ranks, named):
    arguments = ("--to-step", "1", "--poison", poison)
    train(tmp_path, "poisoned", *arguments, ranks=ranks, refused=True)
    report = json.loads((tmp_path / "report-poisoned.json").read_text())
    assert report["refused"].startswith("step 0 is refused, not finite: ")
    assert named in report["refused"]
    assert report["refused"].endswith("no update was made with its 10 trajectories of tickets 0 to 9")
    assert not load_file(tmp_path / "gradient-poisoned.safetensors"), "the optimizer was not stepped"
    if ranks == 1 and poison == "gradient":
        weights, start = load_file(tmp_path / "weights-poisoned.safetensors"), load_file(STARTER / "model.safetensors")
        assert all(torch.equal(weights[name], start[name].float()) for name in start)


@pytest.mark.parametrize("stage", ["1", "3"])
def test_a_routing_bias_is_published_and_saved_bit_for_bit(tmp_path, stage):
    """A buffer, in float32 also where the parameters are in bfloat16; and experts go by the names of the files."""
    folder, bias = tmp_path / "m", "model.layers.1.mlp.gate.e_score_correction_bias"
    sizes = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "n_group": 1, "topk_group": 1}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Glm4MoeConfig(**sizes, **heads, **experts, **tokens))
    model.get_buffer(bias).copy_(torch.tensor([20.03, -3.1, 0.7, 0.0]))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(STARTER).save_pretrained(folder)
    settings = ("--model.path", str(folder), "--model.dtype", "bfloat16", "--learner.zero_stage", stage)
    published = train(tmp_path, "experts", "--to-step", "1", "--save", str(tmp_path / "saved"), settings=settings)
    assert published.keys() == load_file(folder / "model.safetensors").keys()
    saved = load_causal_lm(str(tmp_path / "saved" / "model"), "bfloat16")
    assert torch.equal(published[bias], model.get_buffer(bias))
    assert torch.equal(saved.get_buffer(bias), model.get_buffer(bias))
    router = "model.layers.1.mlp.gate.weight"
    assert torch.equal(published[router].bfloat16(), saved.get_parameter(router).bfloat16())
