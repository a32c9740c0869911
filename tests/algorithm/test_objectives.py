"""Objectives of one's own in the loss, with CISPO of docs/examples."""

from __future__ import annotations

import pytest
import torch

from cusearch_async.algorithm.losses import Surrogate, Tokens, clipped, objective_of, policy_loss
from cusearch_async.config import LossConfig
from cusearch_async.errors import ConfigError
from cusearch_async.learner.update import surrogate_of

CISPO = "docs.examples.objectives:cispo"


def loss_and_gradient(settings, ratios, advantages):
    log_policy = torch.tensor(ratios).log().requires_grad_()
    zeros, ones = torch.zeros(len(ratios)), torch.ones(len(ratios))
    tokens = Tokens(
        lengths=[len(ratios)],
        log_behaviour=zeros,
        log_prox=zeros,
        log_reference=None,
        advantages=torch.tensor(advantages),
        weights=ones,
        aggregation=ones,
    )
    loss, _ = policy_loss(log_policy, tokens, settings)
    loss.backward()
    return loss.item(), log_policy.grad.tolist()


def test_an_objective_of_ones_own_takes_the_place_of_the_clipped_surrogate():
    """CISPO's gradient is the bounded ratio times the advantage, also where the clipped surrogate has none."""
    settings = surrogate_of(LossConfig(objective=CISPO, clip_high=0.5))
    _, gradient = loss_and_gradient(settings, [1.2, 3.0, 0.1], [2.0, 1.0, -1.0])
    assert gradient == pytest.approx([-1.2 * 2, -1.5, 0.1], rel=1e-6)


def test_the_constants_of_the_loss_are_the_settings_of_the_same_names():
    settings = LossConfig(clip_low=0.1, clip_high=0.3, dual_clip=4.0, ratio="sequence", kl_coef=0.5, entropy_coef=0.25)
    assert surrogate_of(settings) == Surrogate(
        objective=clipped, clip_low=0.1, clip_high=0.3, dual_clip=4.0, ratio="sequence", kl_coef=0.5, entropy_coef=0.25
    )


def test_an_objective_that_is_no_value_per_token_is_refused():
    settings = Surrogate(objective=lambda ratio, advantages, _: (ratio * advantages).mean())
    with pytest.raises(ValueError, match="objective"):
        loss_and_gradient(settings, [1.0, 1.0], [1.0, 2.0])


def test_an_objective_that_there_is_not_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"loss\.objective 'ppo' is unknown; use one of clip, or your own as package"):
        objective_of("ppo")
