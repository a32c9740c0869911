"""Every metric of a learner step: name, unit and meaning. docs/metrics.md is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Metrics = dict[str, float | list[int] | list[float | None]]
"""Lists have one entry per depth 0..S_max; None where a depth has nothing to speak of."""

PLACE = ("step", "epoch", "time")
"""Of a row: where it belongs, and no metrics."""


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    unit: str
    """`share` is of 0 to 1, `count` since the last step, `total` since the run began; `[S+1]` a list by depth."""
    meaning: str


@dataclass(frozen=True, slots=True)
class Family:
    title: str
    source: str
    metrics: tuple[Metric, ...]


FAMILIES = (
    Family(
        "The pool",
        "metrics/step.py",
        (
            Metric("reward/all", "reward", "mean over the pool"),
            Metric("reward/trained", "reward", "mean over the selected; minus `reward/all`: the selection's effect"),
            Metric(
                "reward/right_minus_wrong",
                "reward",
                "mean of exact matches minus that of the others, of questions with gold answers; with both",
            ),
            Metric("reward/em", "share", "exact matches in the pool"),
            Metric("reward/f1", "share", "mean F1 over the pool"),
            Metric("reward/format_valid", "share", "episodes in the right format"),
            Metric("reward/answered", "share", "episodes that end with an answer"),
            Metric("reward/compared", "share", "episodes whose question has gold answers"),
            Metric("depth/mean", "searches", "mean search depth of the pool"),
            Metric("depth/mean_trained", "searches", "of the selected"),
            Metric("depth/generated", "trajectories [S+1]", "the pool by depth"),
            Metric("depth/selected", "trajectories [S+1]", "the selected by depth"),
            Metric("groups/singleton_share", "share", "of the selected: alone in their group"),
            Metric("groups/zero_variance_share", "share", "of the selected: in a group with equal rewards"),
            Metric("groups/solved_share", "share", "of the pool's groups: all answers right"),
            Metric("groups/mixed_share", "share", "of the pool's groups: some answers right"),
            Metric("groups/hopeless_share", "share", "of the pool's groups: no answer right"),
            Metric("by_depth/reward", "reward [S+1]", "mean over the pool's trajectories"),
            Metric("by_depth/em", "share [S+1]", "exact matches among the pool's trajectories"),
            Metric("episode/rows", "rows", "mean over the pool; above 1 where agents change their history"),
            Metric("episode/turns", "turns", "mean over the pool"),
            Metric("episode/ignored_fields", "fields", "of agents' requests: ignored; mean over the pool"),
            Metric("episode/cut_turns", "share", "of the turns: cut off at `episode.max_turn_tokens`"),
            Metric("episode/recall", "share", "of a question's evidence: shown to the policy; where evidence is known"),
            Metric("episode/recall_of_searched", "share", "the same of episodes that searched"),
            Metric(
                "episode/repeated_observations",
                "share",
                "of what the environment answered: as before in the episode, as to the same query again",
            ),
            Metric("episode/sampled_tokens", "tokens", "mean over the pool"),
            Metric("episode/seconds_mean", "s", "length of an episode"),
            Metric("episode/seconds_p99", "s", "99th percentile of it"),
            Metric("episode/search_seconds_mean", "s", "of which waiting for searches"),
        ),
    ),
    Family(
        "The selection",
        "algorithm/methods, metrics/step.py",
        (
            Metric("selection/phase", "k", "phase of SDGA-Phase"),
            Metric(
                "selection/phase_trapped",
                "0 or 1",
                "SDGA-Phase: depth k+1 alone fills the budget ([why it matters](algorithm.md#the-phase-trap))",
            ),
            Metric("selection/budget_filled", "ratio", "selected / K; above 1 where the whole pool is trained on"),
            Metric(
                "selection/usable_share",
                "share",
                "of the selected: with a group-relative advantage, because two or more of their group were selected "
                "and rewards differ",
            ),
            Metric(
                "selection/singleton_mass",
                "share",
                "of Σ |A|·tokens over the selected: those alone in their group; 0 where all advantages are 0",
            ),
            Metric("selection/coverage", "tokens", "retrieval tokens C_r(T) of the selected"),
            Metric("selection/coverage_of_best", "share", "of the coverage of the best T of the same size"),
        ),
    ),
    Family(
        "Environments, where a run has several",
        "metrics/step.py",
        (
            Metric("environment/LABEL/share", "share", "of the pool's trajectories"),
            Metric("environment/LABEL/reward", "reward", "mean over its trajectories"),
            Metric("environment/LABEL/em", "share", "exact matches"),
            Metric("environment/LABEL/depth", "searches", "mean depth"),
            Metric("environment/LABEL/trained_share", "share", "of its trajectories: selected"),
        ),
    ),
    Family(
        "Weight of each depth in the gradient",
        "metrics/update.py",
        (
            Metric("by_depth/token_share", "share [S+1]", "of the trained tokens"),
            Metric("by_depth/advantage_mass", "share [S+1]", "of Σ a_t·|A_t|, the gradient's weight"),
            Metric(
                "by_depth/advantage",
                "−1 to 1 [S+1]",
                "Σ a_t·A_t / Σ a_t·|A_t|: all pushed down to all pushed up; raw singletons push up",
            ),
            Metric("by_depth/mismatch_kl", "nats [S+1]", "as `off_policy/mismatch_kl`"),
            Metric("by_depth/weight_bounded_share", "share [S+1]", "tokens whose off-policy weight was bounded"),
            Metric("by_depth/ess", "share [S+1]", "effective sample size / n: (Σ w)² / (n Σ w²)"),
            Metric("by_depth/staleness", "steps [S+1]", "mean staleness of the pool's trajectories"),
        ),
    ),
    Family(
        "Off policy",
        "metrics/step.py, metrics/update.py",
        (
            Metric("staleness/min", "steps", "step − oldest version that sampled a token: least of the pool"),
            Metric("staleness/mean", "steps", "its mean"),
            Metric(
                "staleness/max",
                "steps",
                "most of the pool; at most `pool.max_staleness`, in deferred order + `pool.defer`; no bound in order "
                "`oldest_complete`",
            ),
            Metric(
                "off_policy/mismatch_kl",
                "nats",
                'k3 of π_prox against the sampling policy. With `loss.proximal = "loglinear"` it is interpolated from '
                "the second mini-batch on: there KL, differences and weights of fresh tokens are 0 and 1, whatever the "
                "learner says",
            ),
            Metric("off_policy/logprob_difference_mean", "nats", "|log π_prox − log μ|"),
            Metric("off_policy/logprob_difference_max", "nats", "largest of a token"),
            Metric("off_policy/weight_mean", "ratio", "mean of w after its bound"),
            Metric(
                "off_policy/weight_bounded_share",
                "share",
                "tokens whose weight was truncated, dropped, or set to 1 by `none`",
            ),
            Metric("off_policy/ess", "share", "as `by_depth/ess`, over all tokens"),
        ),
    ),
    Family(
        "The buffer",
        "metrics/step.py",
        (
            Metric("buffer/buffered", "trajectories", "buffered now"),
            Metric("buffer/bytes", "bytes", "payload of the buffered trajectories"),
            Metric("buffer/server_bytes", "bytes", "memory of the Redis server"),
            Metric("buffer/server_share", "share", "of its maxmemory; where it has one"),
            Metric("buffer/latency_s", "s", "of one request to it"),
            Metric("buffer/requeued", "total", "tickets requeued, by a lapsed lease or a failed episode"),
            Metric("buffer/incomplete_groups", "total", "incomplete groups"),
            Metric("buffer/failed_rollouts", "total", "rollouts that these lack"),
            Metric("buffer/quarantined", "total", "trajectories that must not be trained on"),
            Metric("buffer/lost", "total", "trajectories that disappeared from Redis"),
            Metric("buffer/late_refused", "total", "trajectories that came after their group closed"),
        ),
    ),
    Family(
        "The update",
        "learner/learner.py, metrics/update.py",
        (
            Metric("train/trajectories", "trajectories", "trained on"),
            Metric("train/tokens", "tokens", "sampled tokens trained on"),
            Metric(
                "train/computed_share",
                "share",
                "of the trained trajectories' tokens: in forward passes (identical trajectories of a mini-batch are "
                "computed once)",
            ),
            Metric("train/padding_share", "share", "padding in forward passes"),
            Metric("train/optimizer_steps", "steps", "optimizer steps"),
            Metric("train/loss", "loss", "mean over mini-batches"),
            Metric(
                "train/grad_norm", "norm", "mean over mini-batches, before clipping (none at ZeRO stage 0 in float32)"
            ),
            Metric("train/lr", "rate", "learning rate"),
            Metric("train/clip_fraction", "share", "trained tokens whose ratio was clipped"),
            Metric("train/kl_reference", "nats", "mean over trained tokens; 0 without a reference"),
            Metric("train/entropy", "nats", "of the policy, mean over trained tokens"),
        ),
    ),
    Family(
        "The learner's machine",
        "metrics/machine.py",
        (
            Metric("machine/disk_free_gib", "GiB", "free for the run's folder"),
            Metric("machine/memory_used_share", "share", "of the memory that the learner's machine or container gives"),
            Metric("machine/gpu_used_share", "share", "mean use of its GPUs; with nvidia-ml-py"),
            Metric("machine/gpu_memory_share", "share", "of its fullest GPU"),
        ),
    ),
    Family("Alarms", "training/report.py", (Metric("alarms/firing", "alarms", "that fire: `cusearch alarms`"),)),
    Family(
        "Time",
        "metrics/step.py",
        (
            Metric("time/wait_s", "s", "waiting for the pool"),
            Metric("time/update_s", "s", "from the pool to the commit"),
            Metric("time/publish_s", "s", "stopped for publishing the weights"),
            Metric("time/lent_s", "s", "of the update: until the weights before are written"),
            Metric(
                "time/publishing_s", "s", "writing and announcing the newest version, concurrently with the next update"
            ),
            Metric("time/checkpoint_s", "s", "stopped for a checkpoint before the step"),
            Metric("time/step_s", "s", "wait, update, publish and checkpoint together"),
            Metric("learner/idle_share", "share", "waiting / step"),
            Metric("learner/tokens_per_s", "tokens/s", "of the update, prompts and passages included"),
            Metric("rollout/workers", "workers", "alive"),
            Metric("rollout/tokens_per_s", "tokens/s", "sampled by all workers since the last step"),
            Metric("rollout/idle_share", "share", "time that engines stood idle"),
            Metric(
                "rollout/slowest_share",
                "share",
                "of the median worker's tokens per second of a request: the slowest's; where there are several",
            ),
            Metric("rollout/late_episodes", "count", "wasted episodes: another worker finished first"),
            Metric("rollout/weight_load_s", "s", "loading weights, all workers since the last step"),
            Metric("rollout/searches", "count", "searches answered"),
            Metric("rollout/search_failures", "count", "attempts that failed"),
            Metric("rollout/search_p99_s", "s", "a search, retries included (slowest worker, last thousand)"),
        ),
    ),
)


def names() -> set[str]:
    return {metric.name for family in FAMILIES for metric in family.metrics}


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a row; lists, which are by depth, as name/0, name/1 …"""
    found: dict[str, float] = {}
    for name, value in row.items():
        several = value if isinstance(value, list) else [value]
        for index, one in enumerate(several):
            if isinstance(one, int | float) and not isinstance(one, bool):
                found[f"{name}/{index}" if isinstance(value, list) else name] = float(one)
    return found


def scores_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a row of eval.jsonl: eval/CATEGORY/em, …"""
    found: dict[str, float] = {}
    for category, scores in row.items():
        if isinstance(scores, dict) and category != "each":
            found |= {f"eval/{category}/{name}": value for name, value in scalars(scores).items()}
    return found
