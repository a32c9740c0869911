"""What the loss is given, and what the update says of itself, by numbers worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cusearch_async.algorithm.losses import Surrogate, Tokens, TokenTerms, policy_loss
from cusearch_async.config import load_config
from cusearch_async.learner.model import SampledLogprobs
from cusearch_async.learner.plan import plan_update
from cusearch_async.learner.update import Update, learning_rate, surrogate_of, to_backward
from cusearch_async.metrics.update import UpdateReport
from cusearch_async.types import Correction, Proximal
from tests.strategies import make_trajectory


@pytest.fixture
def config_of(atlas_config):
    return lambda *overrides: load_config(atlas_config, list(overrides))


def trajectories():
    """Two: 2 sampled tokens at depth 1, 4 at depth 3; log μ = -1 everywhere; versions 4 and 6."""
    return [
        make_trajectory(
            i, sampled=n, depth=depth, logprobs=np.full(n, -1, np.float32), versions=np.full(n, v, np.int32)
        )
        for i, (n, depth, v) in enumerate([(2, 1, 4), (4, 3, 6)])
    ]


def update_of(selected, *overrides, config_of, advantages=None, step=7):
    """An update whose second mini-batch, after an empty one, is one micro-batch; and that micro-batch."""
    config = config_of(*overrides)
    advantages = np.zeros(len(selected)) if advantages is None else np.array(advantages)
    plan = plan_update(selected, advantages, step, config)
    ((micro,),) = plan.minibatches
    plan = replace(plan, minibatches=((), (micro,)))
    return Update(plan, config.loss, torch.device("cpu")), micro


def laid_out(micro, *values):
    """Values [S] of trajectories 0, 1, …, in the order of the micro-batch."""
    return torch.cat([torch.tensor(values[row], dtype=torch.float32) for row in micro.rows])


FINITE = torch.tensor(1.0)


def test_the_tokens_of_a_micro_batch_lie_trajectory_by_trajectory(config_of):
    aggregation = ("--loss.aggregation", "seq-mean-token-mean")
    update, micro = update_of(trajectories(), *aggregation, config_of=config_of, advantages=[0.5, -2.0])
    assert micro.rows == (1, 0)
    update.set_proximal({micro: laid_out(micro, [-1, -0.5], [-3] * 4)})
    update.set_reference({micro: laid_out(micro, [-9, -8], [0, 1, 2, 3])})
    tokens = update.tokens(micro, torch.full((6,), -1.0))
    assert tokens.lengths == (4, 2)
    assert tokens.advantages.tolist() == [-2.0] * 4 + [0.5] * 2
    assert tokens.aggregation.tolist() == pytest.approx([1 / 8] * 4 + [1 / 4] * 2)
    assert tokens.log_prox.tolist() == [-3.0] * 4 + [-1.0, -0.5]
    assert tokens.log_behaviour.tolist() == [-1.0] * 6
    assert tokens.log_reference is not None
    assert tokens.log_reference.tolist() == [0, 1, 2, 3, -9, -8]
    assert tokens.weights.tolist() == pytest.approx([math.exp(-2)] * 4 + [1, math.exp(0.5)])
    assert update.faults(FINITE) == ""
    assert update.made_of == "2 trajectories of tickets 0 to 1"


def test_the_first_mini_batch_is_its_own_proximal_and_all_others_are_scored(config_of):
    """Seven trajectories, mini-batches of three: π_prox is what the policy says before the first optimizer step."""
    config = config_of("--loss.minibatch", "3", "--method.budget", "6", "--learner.micro_batch_tokens", "8")
    selected = [make_trajectory(i, sampled=2 + i) for i in range(7)]
    plan = plan_update(selected, np.zeros(7), 7, config)
    first, *others = plan.minibatches
    update = Update(plan, config.loss, torch.device("cpu"))
    assert update.to_score == [micro for minibatch in others for micro in minibatch]
    update.set_proximal({micro: torch.full((sum(micro.lengths),), -5.0) for micro in update.to_score})
    for minibatch in plan.minibatches:
        for micro in minibatch:
            tokens = update.tokens(micro, torch.full((sum(micro.lengths),), -2.0))
            assert set(tokens.log_prox.tolist()) == {-2.0 if minibatch is first else -5.0}


def test_a_micro_batch_that_was_not_scored_is_no_first_one(config_of):
    update, micro = update_of(trajectories(), config_of=config_of)
    update.set_proximal({})
    with pytest.raises(KeyError):
        update.tokens(micro, torch.full((6,), -1.0))


def test_without_a_recomputed_proximal_it_is_taken_between_the_policies(config_of):
    """log μ = -1, log π_θ = -2: sampled at 4 by step 7 (α = 3/4) -1.75; at 6 (α = 1/2) -1.5."""
    update, micro = update_of(trajectories(), "--loss.proximal", "loglinear", config_of=config_of)
    tokens = update.tokens(micro, torch.full((6,), -2.0))
    assert tokens.log_prox.tolist() == [-1.5] * 4 + [-1.75] * 2
    assert tokens.log_reference is None


def test_the_first_mini_batch_is_its_own_proximal_however_others_get_theirs(config_of):
    """Interpolated too, ratios of stale tokens were clipped before the policy had moved."""
    config = config_of("--loss.proximal", "loglinear", "--loss.minibatch", "1", "--method.budget", "2")
    plan = plan_update(trajectories(), np.ones(2), 7, config)
    update = Update(plan, config.loss, torch.device("cpu"))
    found = [update.tokens(micro, torch.full((sum(micro.lengths),), -2.0)) for micro in plan.micro_batches]
    assert [set(tokens.log_prox.tolist()) for tokens in found] == [{-2.0}, {-1.75}]


def test_the_settings_of_the_loss_reach_it(config_of):
    config = config_of(
        *("--loss.clip_low", "0.1", "--loss.clip_high", "0.3", "--loss.dual_clip", "4", "--loss.ratio", "sequence"),
        *("--loss.kl_coef", "0.5", "--loss.entropy_coef", "0.25"),
    )
    expected = Surrogate(clip_low=0.1, clip_high=0.3, dual_clip=4, ratio="sequence", kl_coef=0.5, entropy_coef=0.25)
    assert surrogate_of(config.loss) == expected


BOUND = ("--loss.correction_high", "8")


@pytest.mark.parametrize(
    ("correction", "bound", "kept"),
    [
        *[("tis", (), [2, 2]), ("icepop", (), [0, 0]), ("mask", (), [4, 0]), ("geometric", (), [0, 0])],
        *[("none", (), [1, 1]), ("tis", BOUND, [4, 6]), ("mask", BOUND, [4, 6])],
    ],
)
def test_each_correction_has_its_own_bound_unless_one_is_set(config_of, correction, bound, kept):
    """π_prox / μ of 4 and of 6; `mask` drops what is above 5, the others bound at 2."""
    update, micro = update_of(trajectories()[:1], "--loss.correction", correction, *bound, config_of=config_of)
    update.set_proximal({micro: torch.tensor([4.0, 6.0]).log() - 1})
    assert update.tokens(micro, torch.full((2,), -1.0)).weights.tolist() == pytest.approx(kept)


LOW = ("--loss.correction_low", "0.2")


@pytest.mark.parametrize(
    ("correction", "bound", "kept"),
    [("icepop", (), [0, 0.6]), ("icepop", LOW, [0.3, 0.6]), ("geometric", (), [0, 0]), ("geometric", LOW, [0.3, 0.6])],
)
def test_what_is_sampled_more_often_than_it_is_likely_is_left_out(config_of, correction, bound, kept):
    """π_prox / μ of 0.3 and 0.6, 0.42 on geometric average; the lower bound is 0.5 unless it is set."""
    update, micro = update_of(trajectories()[:1], "--loss.correction", correction, *bound, config_of=config_of)
    update.set_proximal({micro: torch.tensor([0.3, 0.6]).log() - 1})
    assert update.tokens(micro, torch.full((2,), -1.0)).weights.tolist() == pytest.approx(kept)


def test_what_is_not_finite_is_named_by_its_trajectory(config_of):
    update, micro = update_of(trajectories(), config_of=config_of)
    update.set_reference({micro: laid_out(micro, [-1, math.nan], [-1] * 4)})
    assert update.faults(FINITE) == "reference log-probabilities of trajectory 0:0"
    update.set_proximal({micro: laid_out(micro, [0, 0], [-math.inf] * 4)})
    assert update.faults(FINITE).startswith("proximal log-probabilities of trajectory 1:0, ")
    update.tokens(micro, laid_out(micro, [-1, -1], [-1, -1, math.inf, -1]))
    assert update.faults(FINITE).endswith(", log-probabilities of trajectory 1:0")


@pytest.mark.parametrize("gradient", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_named(config_of, gradient):
    update, _ = update_of(trajectories(), config_of=config_of)
    assert update.faults(torch.tensor(gradient)) == "the gradient"


def test_many_faults_are_named_in_part(config_of):
    update, micro = update_of([make_trajectory(i) for i in range(5)], config_of=config_of)
    update.set_reference({micro: torch.full((20,), math.nan)})
    named = ", ".join(f"reference log-probabilities of trajectory {i}:0" for i in range(4))
    assert update.faults(torch.tensor(math.nan)) == f"{named} and 2 more"


class Layerless(torch.nn.Module):
    """A language model without layers, as `SampledLogprobs` wraps one: transformers' own waits for the device where
    trajectories are packed, except with attention `varlen`."""

    config = SimpleNamespace(_attn_implementation="varlen")

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(400, 8), torch.nn.Linear(8, 400)

    def base_model(self, input_ids, use_cache, position_ids=None, packed=None):
        return SimpleNamespace(last_hidden_state=self.embedding(input_ids))

    def get_output_embeddings(self):
        return self.head

    def set_output_embeddings(self, head):
        self.head = head


@pytest.mark.parametrize("correction", get_args(Correction))
@pytest.mark.parametrize("proximal", get_args(Proximal))
@pytest.mark.parametrize("packing", ["false", "true"])
def test_nothing_of_a_micro_batch_waits_for_the_device(config_of, correction, proximal, packing):
    """On torch's meta device, whose tensors have no values: whatever needs one on the host raises."""
    settings = ("--loss.correction", correction, "--loss.proximal", proximal, "--loss.ratio", "sequence")
    settings += ("--loss.dual_clip", "3", "--loss.entropy_coef", "0.1", "--learner.packing", packing)
    settings += ("--loss.minibatch", "1", "--method.budget", "2")
    config, device = config_of(*settings), torch.device("meta")
    plan = plan_update(trajectories(), np.zeros(2), 7, config).to(device)
    update, report = Update(plan, config.loss, device), UpdateReport(config.episode.s_max, device)
    policy = SampledLogprobs(Layerless(), 4, entropy_has_gradient=True).to(device)

    def forward(micro):
        return policy(micro.inputs.token_ids, micro.inputs.sampled, 0.7, micro.inputs.packed)

    with torch.no_grad():
        update.set_reference({micro: forward(micro)[0] for micro in plan.micro_batches})
        if proximal == "recomputed":
            update.set_proximal({micro: forward(micro)[0] for micro in update.to_score})
    for micro in plan.micro_batches:
        log_policy, entropy = forward(micro)
        tokens = update.tokens(micro, log_policy.detach())
        loss, terms = policy_loss(log_policy, tokens, surrogate_of(config.loss), entropy)
        loss.backward()
        report.add(micro.depth, tokens, terms, entropy.detach())
    with pytest.raises(NotImplementedError, match="meta tensor"):
        update.faults(torch.zeros((), device=device))


def report_of(*micro_batches):
    report = UpdateReport(3, torch.device("cpu"))
    for depths, tokens, terms, entropy in micro_batches:
        depth = torch.tensor(depths).repeat_interleave(torch.tensor(tokens.lengths))
        report.add(depth, tokens, terms, entropy)
    return report.metrics(optimizer_steps=1)


def test_an_update_is_described_by_depth():
    """Depth 1: one trajectory of 1 token; depth 3: one of 3. Weights 2 (held from e), and 1, 1, 0 (1/√e dropped)."""
    tokens = Tokens(
        lengths=[1, 3],
        log_behaviour=torch.tensor([-2.0, -1.0, -1.0, -1.0]),
        log_prox=torch.tensor([-1.0, -1.0, -1.0, -1.5]),
        log_reference=None,
        advantages=torch.tensor([1.0, -0.5, -0.5, -0.5]),
        weights=torch.tensor([2.0, 1.0, 1.0, 0.0]),
        aggregation=torch.full((4,), 0.25),
    )
    clipped = torch.tensor([True, False, False, False])
    terms = TokenTerms(torch.tensor([1.0, 2.0, 3.0, 4.0]), clipped, torch.full((4,), 0.1))
    found = report_of(([1, 3], tokens, terms, torch.tensor([0.5, 1.0, 1.0, 1.5])))
    of_more, of_less = math.e - 2, math.exp(-0.5) - 0.5  # k3 of a token that has become more, or less, likely
    expected = {
        "train/tokens": 4,
        "train/loss": 10,
        "train/optimizer_steps": 1,
        "train/clip_fraction": 0.25,
        "train/kl_reference": 0.1,
        "train/entropy": 1,
        "off_policy/mismatch_kl": (of_more + of_less) / 4,
        "off_policy/logprob_difference_mean": 0.375,
        "off_policy/logprob_difference_max": 1,
        "off_policy/weight_mean": 1,
        "off_policy/weight_bounded_share": 0.5,
        "off_policy/ess": 16 / (4 * 6),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    by_depth = {
        "token_share": [0, 0.25, 0, 0.75],
        "advantage_mass": [0, 0.4, 0, 0.6],
        "advantage": [None, 1, None, -1],
        "weight_bounded_share": [None, 1, None, 1 / 3],
        "mismatch_kl": [None, of_more, None, of_less / 3],
        "ess": [None, 1, None, 2**2 / (3 * 2)],
    }
    assert {name: found[f"by_depth/{name}"] for name in by_depth} == {
        name: [value if value is None else pytest.approx(value) for value in values]
        for name, values in by_depth.items()
    }


def test_an_update_of_nothing_is_described_too():
    found = report_of()
    assert found["train/tokens"] == 0
    assert found["by_depth/token_share"] == [0, 0, 0, 0]
    assert found["by_depth/ess"] == [None] * 4
    assert not [name for name in found if name.startswith("off_policy/")], "a mean of nothing is no 0"
    assert not {"train/entropy", "train/loss", "train/kl_reference"} & found.keys()


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 6), min_size=2, max_size=6))
def test_a_report_does_not_depend_on_micro_batches(seed, lengths):
    generator = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    columns = {name: torch.rand(count, generator=generator) for name in Tokens.__slots__ if name != "lengths"}
    log_policy, entropy = torch.rand(count, generator=generator), torch.rand(count, generator=generator)
    depths = torch.randint(0, 4, (len(lengths),), generator=generator).tolist()

    def batch(rows):
        inside = [i for row in rows for i in range(sum(lengths[:row]), sum(lengths[: row + 1]))]
        tokens = Tokens(
            lengths=[lengths[row] for row in rows], **{name: column[inside] for name, column in columns.items()}
        )
        _, terms = policy_loss(log_policy[inside], tokens, Surrogate())
        return [depths[row] for row in rows], tokens, terms, entropy[inside]

    rows = list(range(len(lengths)))
    whole, parts = report_of(batch(rows)), report_of(*(batch([row]) for row in rows))
    for name, value in whole.items():
        one, other = (v if isinstance(v, list) else [v] for v in (value, parts[name]))
        for a, b in zip(one, other, strict=True):
            assert a == (b if b is None else pytest.approx(b, rel=1e-6, abs=1e-9)), name


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_mean_of_the_gradients_of_all_ranks_is_that_of_the_whole_mini_batch(config_of, ranks):
    """As DeepSpeed averages them. Five trajectories in mini-batches of two: some ranks have a filler."""
    config = config_of("--loss.minibatch", "2", "--method.budget", "4", "--loss.entropy_coef", "0.1")
    selected = [make_trajectory(i, sampled=2 + i, logprobs=np.full(2 + i, -1, np.float32)) for i in range(5)]
    advantages = np.array([1.0, -0.5, 2.0, 0.25, -1.0])

    def gradient(rank: int, count: int) -> tuple[torch.Tensor, int]:
        """By the mean log-probability of each trajectory, and the fillers met."""
        plan = plan_update(selected, advantages, 3, config, rank, count)
        update = Update(plan, config.loss, torch.device("cpu"))
        means = torch.full((5,), -1.0, requires_grad=True)
        update.set_proximal({micro: means.detach()[micro.trajectory] for micro in update.to_score})
        for micro in plan.micro_batches:
            log_policy = means[micro.trajectory]
            tokens = update.tokens(micro, log_policy.detach())
            loss, _ = policy_loss(log_policy, tokens, surrogate_of(config.loss), -log_policy)
            to_backward(loss, log_policy, micro, count).backward()
        return means.grad, sum(micro.is_filler for micro in plan.micro_batches)

    whole, _ = gradient(0, 1)
    assert whole.abs().min() > 0
    found, fillers = zip(*(gradient(rank, ranks) for rank in range(ranks)), strict=True)
    assert torch.stack(found).mean(dim=0) == pytest.approx(whole, rel=1e-5)
    assert sum(fillers) == {1: 0, 2: 1, 3: 4}[ranks]


def test_each_micro_batch_has_its_own_proximal_and_reference(config_of):
    config = config_of("--loss.minibatch", "1", "--method.budget", "2")
    plan = plan_update(trajectories(), np.ones(2), 7, config)
    update = Update(plan, config.loss, torch.device("cpu"))
    first, second = plan.micro_batches
    update.set_proximal({second: torch.full_like(second.log_behaviour, -2.0)})
    references = {micro: torch.full_like(micro.log_behaviour, -3.0 - n) for n, micro in enumerate((first, second))}
    update.set_reference(references)
    for micro, proximal in ((first, -1.0), (second, -2.0)):
        tokens = update.tokens(micro, torch.full_like(micro.log_behaviour, -1.0))
        assert tokens.log_prox.tolist() == [proximal] * len(micro.trajectory)
        assert tokens.log_reference is not None
        assert tokens.log_reference.tolist() == references[micro].tolist()


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ((), [1, 1, 1, 1, 1, 1, 1]),
        (("--learner.warmup_steps", "3"), [1 / 3, 2 / 3, 1, 1, 1, 1, 1]),
        (("--learner.lr_schedule", "linear"), [1, 4 / 5, 3 / 5, 2 / 5, 1 / 5, 1 / 6, 1 / 7]),
        (("--learner.lr_schedule", "linear", "--learner.warmup_steps", "2"), [1 / 2, 4 / 5, 3 / 5, 2 / 5, 1 / 5]),
    ],
)
def test_the_learning_rate_rises_in_the_warm_up_and_then_stays_or_falls_to_nothing(config_of, overrides, wanted):
    """Of five steps; a step beyond them has a rate, too."""
    config = config_of("--run.steps", "5", "--learner.lr", "0.5", *overrides)
    assert [learning_rate(config, step) for step in range(len(wanted))] == pytest.approx([0.5 * f for f in wanted])
