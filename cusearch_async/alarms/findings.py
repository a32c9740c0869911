"""At which steps each rule fires, by the metrics of the steps so far, and the figures that show it.

Thresholds are those of the 214 healthy runs of docs/replication: `tests/test_alarms.py` counts in how many of them any
rule fires. `reward/right_minus_wrong` is newer than those runs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from cusearch_async.alarms.history import FIRST, LOOK_BACK, RISE, Fires, History, best, first_steps, in_a_row, since


@dataclass(frozen=True, slots=True)
class Finding:
    fires: Fires
    """[steps]"""
    evidence: Callable[[int], str]
    """The figures of a step."""


RECENT = 20
"""Steps whose workers the present ones are compared with."""


def later(fires: Fires) -> Fires:
    """[steps] Not in the first steps, which are what the others are compared with."""
    fires[:FIRST] = False
    return fires


def stops_searching(h: History) -> Finding:
    depth, none = h.average("depth/mean"), h.share_of_depth_0()
    most = best(depth)
    more = in_a_row((none > 0.6) & (none > none[:1] + 0.1), 3)  # not of tickets without a tool
    fires = ((depth < 0.6 * most) | more) & (most > 0.2)
    return Finding(
        fires,
        lambda n: (
            f"{depth[n]:.2f} searches an episode, {depth[n] / max(most[n], 1e-9):.0%} of its best; "
            f"{none[n]:.0%} without any"
        ),
    )


def searches_more_and_more(h: History) -> Finding:
    depth = h.average("depth/mean")
    earlier = depth - since(depth, LOOK_BACK)
    fires = (depth > 1.75 * earlier) & ~h.rose() & (earlier > 0) & (depth > 0.2)
    return Finding(fires, lambda n: f"{earlier[n]:.2f} → {depth[n]:.2f} searches an episode in {LOOK_BACK} steps")


def entropy_falls(h: History) -> Finding:
    entropy = h.average("train/entropy")
    start = first_steps(h.of("train/entropy"))
    fires = later(entropy < 0.5 * start) & ~h.rose()
    return Finding(fires, lambda n: f"{entropy[n]:.4f} nats, {entropy[n] / start:.0%} of the first steps'")


def entropy_rises(h: History) -> Finding:
    entropy = h.average("train/entropy")
    start = first_steps(h.of("train/entropy"))
    return Finding(
        later(entropy > 2 * start), lambda n: f"{entropy[n]:.4f} nats, {entropy[n] / start:.1f} times the first steps'"
    )


def phase_trapped(h: History) -> Finding:
    trapped = in_a_row(h.of("selection/phase_trapped") > 0, 5)
    return Finding(trapped, lambda n: "one depth has filled the budget in five steps in a row")


def off_policy(h: History) -> Finding:
    ess = h.of("off_policy/ess")
    return Finding(ess < 0.95, lambda n: f"effective sample size {ess[n]:.3f} of 1")


def engine_differs(h: History) -> Finding:
    mismatch = h.of("off_policy/mismatch_kl")
    fires = (mismatch > h.limits.mismatch) & (h.of("staleness/max") == 0)
    return Finding(fires, lambda n: f"{mismatch[n]:.1e} nats on fresh tokens, at most {h.limits.mismatch:.0e}")


def reward_without_answers(h: History) -> Finding:
    reward, em = (h.average(name) for name in ("reward/all", "reward/em"))
    rose, of_em = (values - values[:1] for values in (reward, em))
    fires = (rose > 0.1 * h.scale_of_rewards()) & (of_em < RISE) & h.compares_answers()
    return Finding(fires, lambda n: f"reward {rose[n]:+.2f}, exact match {of_em[n]:+.2f} since the first step")


def reward_ignores_answers(h: History) -> Finding:
    gap = h.of("reward/right_minus_wrong")
    fires = in_a_row(gap < 0.1 * h.scale_of_rewards(), 3)
    return Finding(fires, lambda n: f"right answers earn {gap[n]:+.2f} more than the others")


def nothing_to_learn(h: History) -> Finding:
    equal, empty = h.of("groups/zero_variance_share"), h.of("selection/budget_filled") == 0
    together = 1 - h.of("groups/singleton_share")
    all_equal = (together > 0.5) & (equal > 0.9 * together) & (h.of("groups/mixed_share") < 0.1)
    told = "nothing was selected, as no group's rewards differ"
    return Finding(
        in_a_row((equal > 0.9) | all_equal | empty, 3),
        lambda n: told if empty[n] else f"{equal[n]:.0%} of the selected in groups of equal rewards",
    )


def reward_falls(h: History) -> Finding:
    reward = h.average("reward/all")
    most = best(reward)
    fires = in_a_row(reward < most - 0.1 * h.scale_of_rewards(), 3)
    return Finding(fires, lambda n: f"mean reward {reward[n]:.2f}, was {most[n]:.2f}")


def large_gradient(h: History) -> Finding:
    norm = h.of("train/grad_norm")
    usual = np.full(len(norm), np.nan)
    if len(norm) > LOOK_BACK:
        with warnings.catch_warnings(action="ignore"):  # of windows without any
            usual[LOOK_BACK:] = np.nanmedian(sliding_window_view(norm[:-1], LOOK_BACK), axis=1)
    fires = (norm > 2 * h.limits.grad_clip) | ((norm > 10 * usual) & (usual > 0))

    def told(n: int) -> str:
        usually = "" if math.isnan(usual[n]) else f", usually {usual[n]:.2f}"
        return f"norm {norm[n]:.2f}{usually}, clipped at {h.limits.grad_clip:g}"

    return Finding(fires, told)


def drifts(h: History) -> Finding:
    kl = h.of("train/kl_reference")
    return Finding(kl > 0.2, lambda n: f"{kl[n]:.2f} nats from the reference")


def searches_fail(h: History) -> Finding:
    failed, answered = h.of("rollout/search_failures"), h.of("rollout/searches")
    share = failed / np.maximum(failed + answered, 1)
    return Finding((share > 0.2) & (failed > 4), lambda n: f"{share[n]:.0%} of {failed[n] + answered[n]:.0f} attempts")


def episodes_fail(h: History) -> Finding:
    lost = np.diff(h.of("buffer/incomplete_groups"), prepend=0.0)
    lost = np.where(_taken_over(h), 0.0, lost)  # steps that are made again are counted already
    fires = lost >= h.limits.groups / 2
    return Finding(fires, lambda n: f"{lost[n]:.0f} groups incomplete since the last step, of {h.limits.groups}")


def wasted_turns(h: History) -> Finding:
    depth, answered = h.of("depth/mean"), h.of("reward/answered")
    wasted = h.of("episode/turns") - depth - answered
    tells = (best(depth) > 0) & (best(answered) > 0)  # some environments count no turns, or name no answers
    begun = wasted[~np.isnan(wasted)][:1]
    rose = wasted > begun + 0.3 if begun.size else wasted > 0
    tells &= (h.of("reward/format_valid") < 0.9) | rose  # an agent may need turns for a plan
    return Finding(
        (wasted > 0.3) & tells, lambda n: f"{wasted[n]:.2f} turns an episode were neither a search nor an answer"
    )


def turns_are_cut(h: History) -> Finding:
    cut = h.of("episode/cut_turns")
    return Finding(in_a_row(cut > 0.1, 3), lambda n: f"{cut[n]:.0%} of the turns")


def slow_worker(h: History) -> Finding:
    slowest = h.of("rollout/slowest_share")
    return Finding(
        in_a_row(slowest < 0.2, 3),
        lambda n: f"the slowest worker samples {slowest[n]:.1%} of the median's tokens per second of a request",
    )


def no_worker(h: History) -> Finding:
    workers = h.of("rollout/workers")
    padded = np.nan_to_num(np.concatenate([np.zeros(RECENT), workers]))
    most = sliding_window_view(padded, RECENT + 1).max(axis=1) if len(workers) else workers
    return Finding(in_a_row(workers < most / 2, 2), lambda n: f"{workers[n]:.0f} alive, there were {most[n]:.0f}")


def slow_publishing(h: History) -> Finding:
    waits = np.nan_to_num(h.of("time/publish_s")) + np.nan_to_num(h.of("time/lent_s"))
    step = h.of("time/step_s")
    fires = in_a_row((waits > 0.3 * step) & (waits > 1), 3)
    return Finding(
        fires, lambda n: f"{waits[n]:.1f} s of a step's {step[n]:.1f} s are spent waiting for weights to be written"
    )


def buffer_full(h: History) -> Finding:
    held = h.of("buffer/bytes") / h.limits.buffer_bytes
    return Finding(held > 0.9, lambda n: f"{held[n]:.0%} of redis.max_mib")


def redis_full(h: History) -> Finding:
    held = h.of("buffer/server_share")
    return Finding(held > 0.9, lambda n: f"{held[n]:.0%} of the server's maxmemory")


def machine_full(h: History) -> Finding:
    free, memory = h.of("machine/disk_free_gib"), h.of("machine/memory_used_share")
    fires = (free < 2) | in_a_row(memory > 0.95, 3)
    return Finding(fires, lambda n: f"{free[n]:.1f} GiB of disk free, {memory[n]:.0%} of the memory used")


def finds_nothing(h: History) -> Finding:
    recall = h.of("episode/recall_of_searched")
    fires = in_a_row(recall < 0.02, 3)
    return Finding(fires, lambda n: f"{recall[n]:.1%} of the evidence shown in episodes that searched")


def lost(h: History) -> Finding:
    """A learner that has taken over may set aside what was generated with other settings: no trouble."""
    apart = np.where(_taken_over(h), 0.0, np.diff(h.of("buffer/quarantined"), prepend=0.0))
    lost = np.diff(h.of("buffer/lost"), prepend=0.0) + apart
    return Finding(lost > 0, lambda n: f"{lost[n]:.0f} since the last step")


def _taken_over(h: History) -> NDArray[np.bool_]:
    """Where the step is another learner's than the one before it; the first step, where the run has had one before."""
    return np.diff(h.of("epoch"), prepend=1.0) > 0
