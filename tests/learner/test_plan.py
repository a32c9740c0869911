"""The plan of a step: what all ranks do together is every trajectory once, and the same however it is divided."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cusearch_async.config import load_config
from cusearch_async.learner.plan import plan_update
from tests.strategies import make_trajectory

SHAPES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), max_size=20)
"""Prompt and sampled tokens of each trajectory."""


WHOLE = load_config(Path(__file__).parents[2] / "configs" / "atlas.toml", [])


def config_of(minibatch=4, tokens=200, packing=False, aggregation="token-mean", seed=0, **loss):
    changes = {
        "loss": {"minibatch": minibatch, "aggregation": aggregation, **loss},
        "learner": {"micro_batch_tokens": tokens, "packing": packing},
        "run": {"seed": seed},
    }
    return WHOLE.model_copy(
        update={name: getattr(WHOLE, name).model_copy(update=change) for name, change in changes.items()}
    )


def made(shapes):
    """Trajectories whose log-probabilities and versions tell which token of which trajectory they are of."""
    return [
        make_trajectory(
            row,
            prompt=prompt,
            sampled=sampled,
            depth=row % 6,
            logprobs=(-100 * row - np.arange(sampled)).astype(np.float32),
            versions=(100 * row + np.arange(sampled)).astype(np.int32),
        )
        for row, (prompt, sampled) in enumerate(shapes)
    ]


def plans_of(shapes, config, ranks, step=3):
    selected, advantages = made(shapes), np.arange(len(shapes)) / 4 - 1
    return [plan_update(selected, advantages, step, config, rank, ranks) for rank in range(ranks)]


def trained(minibatch):
    return [micro for micro in minibatch if not micro.is_filler]


def structure(plan):
    return [[(micro.rows, micro.is_filler) for micro in minibatch] for minibatch in plan.minibatches]


PLANS = given(SHAPES, st.sampled_from([1, 4, 7]), st.integers(1, 300), st.booleans(), st.integers(1, 5))


@PLANS
def test_over_all_ranks_every_trajectory_is_in_one_micro_batch_of_one_mini_batch(
    shapes, minibatch, tokens, packing, ranks
):
    plans = plans_of(shapes, config_of(minibatch, tokens, packing), ranks)
    parts = [
        [row for share in shares for micro in trained(share) for row in micro.rows]
        for shares in zip(*(plan.minibatches for plan in plans), strict=True)
    ]
    assert sorted(row for part in parts for row in part) == list(range(len(shapes)))
    assert len(parts) == -(-len(shapes) // minibatch)
    assert max(map(len, parts), default=0) <= minibatch


@PLANS
def test_every_rank_calls_forward_and_backward_equally_often_in_each_mini_batch(
    shapes, minibatch, tokens, packing, ranks
):
    plans = plans_of(shapes, config_of(minibatch, tokens, packing), ranks)
    for shares in zip(*(plan.minibatches for plan in plans), strict=True):
        assert len({len(share) for share in shares}) == 1
        assert any(not micro.is_filler for micro in (share[-1] for share in shares)), "no more fillers than needed"


@PLANS
def test_a_micro_batch_keeps_the_token_limit_or_is_one_trajectory(shapes, minibatch, tokens, packing, ranks):
    for plan in plans_of(shapes, config_of(minibatch, tokens, packing), ranks):
        for micro in plan.micro_batches:
            distinct = {plan.selected[row].token_ids.tobytes() for row in micro.rows}
            assert micro.inputs.token_ids.numel() <= tokens or len(distinct) == 1
            assert (micro.inputs.packed is not None) == packing


@PLANS
def test_rows_are_computed_alone_and_weigh_as_their_trajectory(shapes, minibatch, tokens, packing, ranks):
    """As if each row were a trajectory of its own, but for the mini-batch and the weight of the whole."""
    selected, advantages = made(shapes), np.arange(len(shapes)) / 4 - 1
    split = [
        replace(t, starts=(0, prompt + sampled // 2)) if sampled > 1 else t
        for t, (prompt, sampled) in zip(selected, shapes, strict=True)
    ]
    config = config_of(minibatch, tokens, packing, "seq-mean-token-mean")
    wholes = [plan_update(selected, advantages, 3, config, rank, ranks) for rank in range(ranks)]
    plans = [plan_update(split, advantages, 3, config, rank, ranks) for rank in range(ranks)]

    def of_tokens(plans):
        """By mini-batch and by what was recorded of the token, which is unlike all others."""
        return {
            (number, version): tuple(values)
            for plan in plans
            for number, part in enumerate(plan.minibatches)
            for micro in trained(part)
            for version, *values in zip(
                micro.versions.tolist(),
                micro.trajectory.tolist(),
                micro.depth.tolist(),
                micro.log_behaviour.tolist(),
                micro.advantages.tolist(),
                micro.aggregation.tolist(),
                strict=True,
            )
        }

    assert of_tokens(plans) == of_tokens(wholes)
    for plan in plans:
        assert len(plan.rows) == sum(len(t.starts) for t in split)
        for micro in plan.micro_batches:
            own = [plan.rows[number] for number in micro.rows]
            assert micro.lengths == tuple(row.sampled_tokens for row in own)
            lengths = {len(row.token_ids) for row in own}
            assert micro.inputs.token_ids.shape[1] == (max(lengths) if not packing else micro.tokens)
            ids = micro.inputs.token_ids.flatten()[micro.inputs.sampled][micro.computed]
            np.testing.assert_array_equal(ids, np.concatenate([row.token_ids[row.sampled] for row in own]))


def test_of_trajectories_with_the_same_tokens_one_is_computed():
    """Rows 0, 2 and 3 are alike but for what they were sampled with."""
    (plan,) = plans_of([(3, 4), (3, 5), (3, 4), (3, 4)], config_of(minibatch=4), 1)
    (micro,) = plan.micro_batches
    assert (micro.rows[0], set(micro.rows[1:])) == (1, {0, 2, 3})
    assert micro.inputs.token_ids.shape == (2, len(plan.selected[1].token_ids))
    assert micro.computed.tolist() == [0, 1, 2, 3, 4] + [5, 6, 7, 8] * 3
    assert micro.lengths == (5, 4, 4, 4)


@PLANS
def test_no_micro_batch_computes_the_same_tokens_twice(shapes, minibatch, tokens, packing, ranks):
    for shares in zip(
        *(plan.minibatches for plan in plans_of(shapes, config_of(minibatch, tokens, packing), ranks)), strict=True
    ):
        computed = [shapes[row] for share in shares for micro in trained(share) for row in micro.rows]
        passes = [
            len(micro.inputs.packed.lengths) if micro.inputs.packed else len(micro.inputs.token_ids)
            for share in shares
            for micro in trained(share)
        ]
        assert sum(passes) == len(set(computed))


def test_the_tokens_of_a_plan_by_hand():
    """Prompt, sampled and two more: 9, 10, 9 and 9 tokens, of which the first and the last two are alike."""
    shapes = [(3, 4), (3, 5), (3, 4), (3, 4)]
    (plan,) = plans_of(shapes, config_of(minibatch=4), 1)
    assert plan.tokens() == (9 + 10 + 9 + 9, 10 + 9, 20)
    (packed,) = plans_of(shapes, config_of(minibatch=4, packing=True), 1)
    assert packed.tokens() == (37, 19, 19)
    first, second = plans_of(shapes, config_of(minibatch=4), 2)
    assert (first.tokens(), second.tokens()) == ((10, 10, 10), (27, 9, 9))
    third = plans_of(shapes, config_of(minibatch=4), 3)[2]
    assert third.tokens() == (0, 0, 0), "a filler"


def advantages_only(**loss):
    """Settings with which nothing but its advantage moves a token."""
    return {"kl_coef": 0.0, "entropy_coef": 0.0} | loss


def with_gradient(plan):
    return [{row for micro in trained(part) if micro.has_gradient for row in micro.rows} for part in plan.minibatches]


def test_trajectories_without_an_advantage_have_no_gradient_where_nothing_else_moves_them():
    def part(shapes, advantages, **loss):
        (rows,) = with_gradient(
            plan_update(made(shapes), np.array(advantages), 3, config_of(**advantages_only(**loss)))
        )
        return rows

    different = [(1, n) for n in (2, 3, 4, 5)]
    assert part(different, [0, 0.5, 0, -1.0]) == {1, 3}
    for loss in ({"kl_coef": 0.1}, {"entropy_coef": 0.1}, {"objective": "my.module:function"}):
        assert part(different, [0, 0.5, 0, -1.0], **loss) == {0, 1, 2, 3}
    assert part([(3, 4), (3, 4), (3, 6), (3, 8)], [0, 1.0, 0, 1.0]) == {0, 1, 3}, "a copy has an advantage"


def test_where_none_has_an_advantage_the_shortest_makes_the_gradient_of_zeros():
    """The optimizer steps all the same: its moments go on."""
    selected = made([(1, 5), (1, 2), (1, 4)])
    for ranks in (1, 2):
        plans = [plan_update(selected, np.zeros(3), 3, config_of(**advantages_only()), r, ranks) for r in range(ranks)]
        assert [with_gradient(plan) for plan in plans] == [[{1}], [set()]][:ranks]
        assert all(sum(micro.has_gradient for micro in plan.micro_batches) == 1 for plan in plans)


@PLANS
def test_every_rank_calls_backward_equally_often_where_some_have_no_gradient(shapes, minibatch, tokens, packing, ranks):
    config, selected = config_of(minibatch, tokens, packing, **advantages_only()), made(shapes)
    advantages = np.arange(len(shapes)) % 3 - 1.0
    plans = [plan_update(selected, advantages, 3, config, rank, ranks) for rank in range(ranks)]
    for parts in zip(*(plan.minibatches for plan in plans), strict=True):
        assert len({tuple(micro.has_gradient for micro in part) for part in parts}) == 1
        assert parts[0][0].has_gradient
    rows = sorted(row for plan in plans for part in plan.minibatches for micro in trained(part) for row in micro.rows)
    assert rows == list(range(len(shapes)))


@PLANS
def test_each_token_has_what_its_own_trajectory_says_of_it(shapes, minibatch, tokens, packing, ranks):
    for plan in plans_of(shapes, config_of(minibatch, tokens, packing), ranks):
        for micro in plan.micro_batches:
            chosen = [plan.selected[row] for row in micro.rows]
            assert micro.lengths == tuple(len(t.logprobs) for t in chosen)
            row = micro.trajectory.tolist()
            assert row == [i for i in micro.rows for _ in plan.selected[i].logprobs]
            assert micro.depth.tolist() == [plan.selected[i].depth for i in row]
            assert micro.advantages.tolist() == [i / 4 - 1 for i in row]
            np.testing.assert_array_equal(micro.log_behaviour, np.concatenate([t.logprobs for t in chosen]))
            np.testing.assert_array_equal(micro.versions, np.concatenate([t.versions for t in chosen]))
            ids = micro.inputs.token_ids.flatten()[micro.inputs.sampled][micro.computed]
            np.testing.assert_array_equal(ids, np.concatenate([t.token_ids[t.sampled] for t in chosen]))


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@given(SHAPES, st.integers(1, 300), st.booleans(), st.integers(1, 5))
def test_the_weight_of_a_token_does_not_depend_on_how_a_mini_batch_is_divided(
    aggregation, shapes, tokens, packing, ranks
):
    def weights(plans):
        return {
            row: weight
            for plan in plans
            for micro in plan.micro_batches
            for row, weight in zip(micro.trajectory.tolist(), micro.aggregation.tolist(), strict=True)
        }

    whole = weights(plans_of(shapes, config_of(tokens=100_000, aggregation=aggregation), 1))
    assert weights(plans_of(shapes, config_of(4, tokens, packing, aggregation), ranks)) == whole


def test_the_weights_of_a_mini_batch_by_hand():
    """Sampled 2 and 4 tokens in one mini-batch, divided between two ranks: 1/(2·2) and 1/(2·4)."""
    plans = plans_of([(1, 2), (1, 4)], config_of(aggregation="seq-mean-token-mean"), 2)
    assert [plan.micro_batches[0].rows for plan in plans] == [(1,), (0,)]
    assert [plan.micro_batches[0].aggregation.tolist() for plan in plans] == [[1 / 8] * 4, [1 / 4] * 2]


def test_a_sum_is_normed_by_the_longest_possible_episode():
    """Six turns of 80 tokens, two trajectories."""
    (plan,) = plans_of([(1, 2), (1, 4)], config_of(aggregation="seq-mean-token-sum-norm"), 1)
    assert plan.micro_batches[0].aggregation.tolist() == pytest.approx([1 / (2 * 480)] * 6)


def test_minibatches_are_shuffled_by_run_and_step():
    def dealt(step, **settings):
        (plan,) = plans_of([(3, 4)] * 64, config_of(32, **settings), 1, step)
        return structure(plan)

    assert dealt(3) == dealt(3)
    assert dealt(3) != dealt(4)
    assert dealt(3) != dealt(3, seed=1)


def test_a_plan_moves_to_a_device_whole():
    (plan,) = plans_of([(1, 2), (1, 4)], config_of(packing=True), 1)
    moved = plan.to(torch.device("meta"))
    assert structure(moved) == structure(plan)
    for micro in moved.micro_batches:
        tensors = [
            value for record in (micro, micro.inputs) for value in map(record.__getattribute__, record.__slots__)
        ]
        tensors += micro.inputs.packed
        found = [value for value in tensors if isinstance(value, torch.Tensor)]
        assert len(found) == 11
        assert all(tensor.device.type == "meta" for tensor in found)
