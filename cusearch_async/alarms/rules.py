"""Rules that tell a run in trouble from a healthy one, by the metrics of its steps.

A rule looks at the steps so far, never at later ones. Thresholds are those of the 214 healthy runs of
docs/replication: `tests/test_alarms.py` counts in how many of them any rule fires."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from cusearch_async.alarms.history import (
    FIRST,
    LOOK_BACK,
    RISE,
    Fires,
    History,
    best,
    first_steps,
    in_a_row,
    since,
)


@dataclass(frozen=True, slots=True)
class Finding:
    fires: Fires
    """[steps]"""
    evidence: Callable[[int], str]
    """The figures of a step."""


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    metric: str
    """The one to draw."""
    condition: str
    cause: str
    remedy: str
    look: str
    """A command, with {run} for the run's folder and {step}."""
    find: Callable[[History], Finding]


RECENT = 20
"""Steps whose workers the present ones are compared with."""


def later(fires: Fires) -> Fires:
    """[steps] Not in the first steps, which are what the others are compared with."""
    fires[:FIRST] = False
    return fires


def _stops_searching(h: History) -> Finding:
    depth, none = h.average("depth/mean"), h.share_of_depth_0()
    most = best(depth)
    fires = ((depth < 0.6 * most) | in_a_row(none > 0.6, 3)) & (most > 0.2)
    return Finding(
        fires,
        lambda n: (
            f"{depth[n]:.2f} searches an episode, {depth[n] / max(most[n], 1e-9):.0%} of its best; "
            f"{none[n]:.0%} without any"
        ),
    )


def _searches_more_and_more(h: History) -> Finding:
    depth = h.average("depth/mean")
    earlier = depth - since(depth, LOOK_BACK)
    fires = (depth > 1.75 * earlier) & ~h.rose() & (earlier > 0)
    return Finding(fires, lambda n: f"{earlier[n]:.2f} → {depth[n]:.2f} searches an episode in {LOOK_BACK} steps")


def _entropy_falls(h: History) -> Finding:
    entropy = h.average("train/entropy")
    start = first_steps(h.of("train/entropy"))
    fires = later(entropy < 0.5 * start) & ~h.rose()
    return Finding(fires, lambda n: f"{entropy[n]:.4f} nats, {entropy[n] / start:.0%} of the first steps'")


def _entropy_rises(h: History) -> Finding:
    entropy = h.average("train/entropy")
    start = first_steps(h.of("train/entropy"))
    return Finding(
        later(entropy > 2 * start), lambda n: f"{entropy[n]:.4f} nats, {entropy[n] / start:.1f} times the first steps'"
    )


def _phase_trapped(h: History) -> Finding:
    trapped = in_a_row(h.of("selection/phase_trapped") > 0, 5)
    return Finding(trapped, lambda n: "one depth has filled the budget in five steps in a row")


def _off_policy(h: History) -> Finding:
    ess = h.of("off_policy/ess")
    return Finding(ess < 0.95, lambda n: f"effective sample size {ess[n]:.3f} of 1")


def _engine_differs(h: History) -> Finding:
    mismatch = h.of("off_policy/mismatch_kl")
    fires = (mismatch > h.limits.mismatch) & (h.of("staleness/max") == 0)
    return Finding(fires, lambda n: f"{mismatch[n]:.1e} nats on fresh tokens, at most {h.limits.mismatch:.0e}")


def _reward_without_answers(h: History) -> Finding:
    reward, em = (h.average(name) for name in ("reward/all", "reward/em"))
    rose, of_em = (values - values[:1] for values in (reward, em))
    fires = (rose > 0.1 * h.scale_of_rewards()) & (of_em < RISE)
    return Finding(fires, lambda n: f"reward {rose[n]:+.2f}, exact match {of_em[n]:+.2f} since the first step")


def _nothing_to_learn(h: History) -> Finding:
    equal = h.of("groups/zero_variance_share")
    return Finding(in_a_row(equal > 0.9, 3), lambda n: f"{equal[n]:.0%} of the selected in groups of equal rewards")


def _reward_falls(h: History) -> Finding:
    reward = h.average("reward/all")
    most = best(reward)
    fires = in_a_row(reward < most - 0.1 * h.scale_of_rewards(), 3)
    return Finding(fires, lambda n: f"mean reward {reward[n]:.2f}, was {most[n]:.2f}")


def _large_gradient(h: History) -> Finding:
    norm = h.of("train/grad_norm")
    usual = np.full(len(norm), np.nan)
    if len(norm) > LOOK_BACK:
        usual[LOOK_BACK:] = np.median(sliding_window_view(norm[:-1], LOOK_BACK), axis=1)
    fires = (norm > 2 * h.limits.grad_clip) | ((norm > 10 * usual) & (usual > 0))
    return Finding(fires, lambda n: f"norm {norm[n]:.2f}, usually {usual[n]:.2f}, clipped at {h.limits.grad_clip:g}")


def _drifts(h: History) -> Finding:
    kl = h.of("train/kl_reference")
    return Finding(kl > 0.2, lambda n: f"{kl[n]:.2f} nats from the reference")


def _not_finite(h: History) -> Finding:
    loss = h.of("train/loss")
    return Finding(h.has("train/loss") & ~np.isfinite(loss), lambda n: f"train/loss is {loss[n]}")


def _searches_fail(h: History) -> Finding:
    failed, answered = h.of("rollout/search_failures"), h.of("rollout/searches")
    share = failed / np.maximum(failed + answered, 1)
    return Finding((share > 0.2) & (failed > 4), lambda n: f"{share[n]:.0%} of {failed[n] + answered[n]:.0f} attempts")


def _episodes_fail(h: History) -> Finding:
    lost = np.diff(h.of("buffer/incomplete_groups"), prepend=0.0)
    fires = lost >= h.limits.questions / 2
    return Finding(fires, lambda n: f"{lost[n]:.0f} groups incomplete since the last step, of {h.limits.questions}")


def _wasted_turns(h: History) -> Finding:
    depth, answered = h.of("depth/mean"), h.of("reward/answered")
    wasted = h.of("episode/turns") - depth - answered
    tells = (best(depth) > 0) & (best(answered) > 0)  # some environments count no turns, or name no answers
    return Finding(
        (wasted > 0.3) & tells, lambda n: f"{wasted[n]:.2f} turns an episode were neither a search nor an answer"
    )


def _turns_are_cut(h: History) -> Finding:
    cut = h.of("episode/cut_turns")
    return Finding(in_a_row(cut > 0.1, 3), lambda n: f"{cut[n]:.0%} of the turns")


def _slow_worker(h: History) -> Finding:
    slowest = h.of("rollout/slowest_share")
    return Finding(
        in_a_row(slowest < 0.2, 3),
        lambda n: f"the slowest worker samples {slowest[n]:.1%} of the median's tokens a second",
    )


def _no_worker(h: History) -> Finding:
    workers = h.of("rollout/workers")
    padded = np.nan_to_num(np.concatenate([np.zeros(RECENT), workers]))
    most = sliding_window_view(padded, RECENT + 1).max(axis=1) if len(workers) else workers
    return Finding(in_a_row(workers < most / 2, 2), lambda n: f"{workers[n]:.0f} alive, there were {most[n]:.0f}")


def _slow_publishing(h: History) -> Finding:
    waits, step = h.of("time/publish_s"), h.of("time/step_s")
    fires = in_a_row((waits > 0.3 * step) & (waits > 1), 3)
    return Finding(
        fires, lambda n: f"{waits[n]:.1f} s of a step's {step[n]:.1f} s are spent waiting for weights to be written"
    )


def _buffer_full(h: History) -> Finding:
    held = h.of("buffer/bytes") / h.limits.buffer_bytes
    return Finding(held > 0.9, lambda n: f"{held[n]:.0%} of redis.max_mib")


def _redis_full(h: History) -> Finding:
    held = h.of("buffer/server_share")
    return Finding(held > 0.9, lambda n: f"{held[n]:.0%} of the server's maxmemory")


def _machine_full(h: History) -> Finding:
    free, memory = h.of("machine/disk_free_gib"), h.of("machine/memory_used_share")
    fires = (free < 2) | in_a_row(memory > 0.95, 3)
    return Finding(fires, lambda n: f"{free[n]:.1f} GiB of disk free, {memory[n]:.0%} of the memory used")


def _finds_nothing(h: History) -> Finding:
    recall, depth = h.of("episode/recall"), h.of("depth/mean")
    fires = in_a_row((recall < 0.02) & (depth > 0.2), 3)
    return Finding(fires, lambda n: f"{recall[n]:.1%} of the evidence shown in {depth[n]:.2f} searches an episode")


def _lost(h: History) -> Finding:
    lost = np.diff(h.of("buffer/lost") + h.of("buffer/quarantined"), prepend=0.0)
    return Finding(lost > 0, lambda n: f"{lost[n]:.0f} since the last step")


TRACE = "cusearch trace {run} --step {step}"
RULES = (
    Rule(
        "stops_searching",
        "depth/mean",
        "mean depth below 0.6 of its best, or more than 0.6 of the episodes without a search in three steps",
        "The agent answers without searching: an answer at once earns too much, or a search fails to help.",
        "Lower what the format alone earns, or lr; look at what the retriever answers.",
        TRACE,
        _stops_searching,
    ),
    Rule(
        "searches_more_and_more",
        "depth/mean",
        "mean depth 1.75 times that of eight steps before, exact match not up by 0.02",
        "Searches are not paid for by answers: deep trajectories are favoured as such.",
        "Use method.phase_reserve or another method; lower episode.s_max.",
        TRACE,
        _searches_more_and_more,
    ),
    Rule(
        "entropy_falls",
        "train/entropy",
        "entropy below half of the first steps', exact match not up by 0.02 in eight steps",
        "The policy says the same whatever is asked; groups will soon be equal.",
        "Lower lr, raise episode.temperature or loss.entropy_coef.",
        TRACE,
        _entropy_falls,
    ),
    Rule(
        "entropy_rises",
        "train/entropy",
        "entropy above twice the first steps'",
        "The policy dissolves into noise: updates are too large, or an entropy bonus too high.",
        "Lower lr or loss.entropy_coef; resume from an earlier checkpoint.",
        TRACE,
        _entropy_rises,
    ),
    Rule(
        "phase_trapped",
        "selection/phase_trapped",
        "selection/phase_trapped in five steps in a row",
        "One depth alone fills the budget: nothing deeper is trained on, and the phase cannot move.",
        "Set method.phase_reserve to 0.5.",
        "cusearch replay {run} --step {step} --method sdga_auto",
        _phase_trapped,
    ),
    Rule(
        "off_policy",
        "off_policy/ess",
        "effective sample size below 0.95",
        "Trained tokens are of a policy too far from the present one.",
        "Lower pool.max_staleness or lr.",
        "cusearch runs plot {run}",
        _off_policy,
    ),
    Rule(
        "engine_differs",
        "off_policy/mismatch_kl",
        "mismatch on fresh tokens above 1e-4 nats (float32) or 1e-3",
        "Engine and learner compute different probabilities for the same weights.",
        "Compare model.dtype, rollout.vllm.quantization and the attention kernels.",
        "cusearch check {run}/config.toml",
        _engine_differs,
    ),
    Rule(
        "reward_without_answers",
        "reward/all",
        "mean reward up by 0.1 (where rewards exceed 1, of their size), exact match by less than 0.02",
        "The policy learns what the reward pays beside right answers, such as the format.",
        "Lower environment.LABEL.format_weight, or correct your reward.",
        TRACE,
        _reward_without_answers,
    ),
    Rule(
        "nothing_to_learn",
        "groups/zero_variance_share",
        "more than 0.9 of the selected in groups of equal rewards, in three steps",
        "All rollouts of most questions are right, or all are wrong: no advantage, no gradient.",
        "Choose questions of another difficulty, raise pool.rollouts, or warm-start the model.",
        TRACE,
        _nothing_to_learn,
    ),
    Rule(
        "reward_falls",
        "reward/all",
        "mean reward 0.1 (where rewards exceed 1, of their size) below its best in three steps",
        "Training makes the policy worse.",
        "Lower lr; resume from an earlier checkpoint.",
        TRACE,
        _reward_falls,
    ),
    Rule(
        "large_gradient",
        "train/grad_norm",
        "gradient norm above twice learner.grad_clip, or ten times the median of eight steps",
        "A few trajectories dominate the update, or lr is too high.",
        "Look at the step's advantages; lower lr.",
        TRACE,
        _large_gradient,
    ),
    Rule(
        "drifts",
        "train/kl_reference",
        "train/kl_reference above 0.2 nats",
        "The policy has moved far from the model it began as.",
        "Raise loss.kl_coef, or lower lr.",
        "cusearch runs plot {run}",
        _drifts,
    ),
    Rule(
        "not_finite",
        "train/loss",
        "train/loss is not a finite number",
        "The update has overflowed: the weights are of no use from here on.",
        "Resume from an earlier checkpoint with a lower lr.",
        TRACE,
        _not_finite,
    ),
    Rule(
        "searches_fail",
        "rollout/search_failures",
        "more than 0.2 of the attempts to search fail",
        "The retriever is overloaded, unreachable, or answers what cannot be read.",
        "Look at the retriever's log; lower retriever.concurrency.",
        "cusearch check {run}/config.toml",
        _searches_fail,
    ),
    Rule(
        "episodes_fail",
        "buffer/incomplete_groups",
        "as many incomplete groups since the last step as half of pool.questions, or more",
        "Most episodes end in an error: environment, reward or retriever.",
        "Read the worker's log.",
        "cusearch buckets {run}/config.toml --ledger",
        _episodes_fail,
    ),
    Rule(
        "wasted_turns",
        "episode/turns",
        "more than 0.3 turns an episode that are neither a search nor an answer, where both are counted",
        "The policy does not keep the format.",
        "Warm-start the model, or show the format in the prompt template.",
        TRACE,
        _wasted_turns,
    ),
    Rule(
        "turns_are_cut",
        "episode/cut_turns",
        "more than 0.1 of the turns cut off, in three steps",
        "Turns end before their tag, which makes their episodes invalid.",
        "Raise episode.max_turn_tokens.",
        TRACE,
        _turns_are_cut,
    ),
    Rule(
        "workers_gone",
        "rollout/workers",
        "fewer than half as many workers as in the twenty steps before, in two steps",
        "Rollout workers have ended or hang.",
        "Start them again; a worker that hangs is named by `buckets`.",
        "cusearch buckets {run}/config.toml --workers",
        _no_worker,
    ),
    Rule(
        "slow_worker",
        "rollout/slowest_share",
        "a worker samples less than 0.2 of the median worker's tokens per busy second, in three steps",
        "One worker's machine is overloaded or throttled: pools in ticket order wait for its episodes.",
        "Look at its machine, or end it: its tickets go to others.",
        "cusearch buckets {run}/config.toml --workers",
        _slow_worker,
    ),
    Rule(
        "slow_publishing",
        "time/publish_s",
        "more than 0.3 of a step, and a second, waiting until earlier weights are written, in three steps",
        "Writing a version takes longer than a step: the disk is slow, or busy.",
        "Put weights.folder into /dev/shm, or raise learner.publish_every.",
        "cusearch check {run}/config.toml",
        _slow_publishing,
    ),
    Rule(
        "buffer_full",
        "buffer/bytes",
        "buffered payloads above 0.9 of redis.max_mib",
        "Workers will soon wait for room.",
        "Raise redis.max_mib; look whether the learner runs.",
        "cusearch buckets {run}/config.toml --once",
        _buffer_full,
    ),
    Rule(
        "redis_full",
        "buffer/server_share",
        "the Redis server uses more than 0.9 of its maxmemory",
        "Redis will soon refuse to store.",
        "Raise maxmemory above redis.max_mib, or lower that.",
        "cusearch buckets {run}/config.toml --once",
        _redis_full,
    ),
    Rule(
        "machine_full",
        "machine/disk_free_gib",
        "less than 2 GiB of disk free, or more than 0.95 of the memory used in three steps",
        "The next checkpoint may fail, or the kernel may end a process.",
        "Delete old checkpoints or records; lower learner.keep_checkpoints.",
        "cusearch check",
        _machine_full,
    ),
    Rule(
        "finds_nothing",
        "episode/recall",
        "less than 0.02 of the evidence shown in three steps, though the agent searches",
        "The retriever answers rubbish, or serves another corpus than the questions'.",
        "Look at what a search answers.",
        TRACE,
        _finds_nothing,
    ),
    Rule(
        "trajectories_lost",
        "buffer/lost",
        "buffer/lost or buffer/quarantined grows",
        "Trajectories have disappeared from Redis, or could not be read.",
        "Look for eviction or other users of this Redis; `buffer quarantine` shows what was kept.",
        "cusearch buckets {run}/config.toml --ledger",
        _lost,
    ),
)
