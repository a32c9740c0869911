"""Rules that tell a run in trouble from a healthy one, by the metrics of its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cusearch_async.alarms import findings
from cusearch_async.alarms.findings import Finding
from cusearch_async.alarms.history import History


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


TRACE = "cusearch trace {run} --step {step}"
RULES = (
    Rule(
        "stops_searching",
        "depth/mean",
        "mean depth below 0.6 of its best, or more than 0.6 of the episodes, and 0.1 more than at first, without a "
        "search in three steps; the best above 0.2",
        "The agent answers without searching: an answer at once earns too much, or a search fails to help.",
        "Lower what the format alone earns, or lr; look at what the retriever answers.",
        TRACE,
        findings.stops_searching,
    ),
    Rule(
        "searches_more_and_more",
        "depth/mean",
        "mean depth 1.75 times that of eight steps before and above 0.2, exact match (the reward, of its size, where "
        "there are no answers) not up by 0.02",
        "Searches are not paid for by answers: deep trajectories are favoured as such.",
        "Use method.phase_reserve or another method; lower episode.s_max.",
        TRACE,
        findings.searches_more_and_more,
    ),
    Rule(
        "entropy_falls",
        "train/entropy",
        "entropy below half of the first steps', exact match (the reward, of its size, where there are no answers) not "
        "up by 0.02 in eight steps",
        "The policy says the same whatever is asked; groups will soon be equal.",
        "Lower lr, raise episode.temperature or loss.entropy_coef.",
        TRACE,
        findings.entropy_falls,
    ),
    Rule(
        "entropy_rises",
        "train/entropy",
        "entropy above twice the first steps'",
        "The policy dissolves into noise: updates are too large, or an entropy bonus too high.",
        "Lower lr or loss.entropy_coef; fork an earlier checkpoint (`cusearch runs fork`).",
        TRACE,
        findings.entropy_rises,
    ),
    Rule(
        "phase_trapped",
        "selection/phase_trapped",
        "selection/phase_trapped in five steps in a row",
        "One depth alone fills the budget: nothing deeper is trained on, and the phase cannot move.",
        "Set method.phase_reserve to 0.5.",
        "cusearch replay {run} --step {step} --method sdga_auto",
        findings.phase_trapped,
    ),
    Rule(
        "off_policy",
        "off_policy/ess",
        "effective sample size below 0.95",
        "Trained tokens are of a policy too far from the present one.",
        "Lower pool.max_staleness or lr.",
        "cusearch dashboard {run}",
        findings.off_policy,
    ),
    Rule(
        "engine_differs",
        "off_policy/mismatch_kl",
        "mismatch on fresh tokens above 1e-4 nats (float32) or 1e-3",
        "Engine and learner compute different probabilities for the same weights.",
        "Compare model.dtype, rollout.vllm.quantization and the attention kernels.",
        "cusearch check {run}/config.toml",
        findings.engine_differs,
    ),
    Rule(
        "reward_without_answers",
        "reward/all",
        "mean reward up by 0.1 (where rewards exceed 1, of their size), exact match by less than 0.02, where answers "
        "are given",
        "The policy learns what the reward pays beside right answers, such as the format.",
        "Lower environment.LABEL.format_weight, or correct your reward.",
        TRACE,
        findings.reward_without_answers,
    ),
    Rule(
        "reward_ignores_answers",
        "reward/right_minus_wrong",
        "exact matches earn less than 0.1 (where rewards exceed 1, of their size) more than others, in three steps",
        "The reward does not depend on the answer: it pays the format, the length or the number of searches.",
        "Correct environment.LABEL.reward; look at whether the golden answers are right.",
        TRACE,
        findings.reward_ignores_answers,
    ),
    Rule(
        "nothing_to_learn",
        "groups/zero_variance_share",
        "more than 0.9 of the selected, or of most that are not alone in their group, in groups of equal rewards, or "
        "nothing selected, in three steps",
        "All rollouts of most questions are right, or all are wrong: no advantage, no gradient.",
        "Choose questions of another difficulty, raise pool.rollouts, or warm-start the model.",
        TRACE,
        findings.nothing_to_learn,
    ),
    Rule(
        "reward_falls",
        "reward/all",
        "mean reward 0.1 (where rewards exceed 1, of their size) below its best in three steps",
        "Training makes the policy worse.",
        "Lower lr; fork an earlier checkpoint (`cusearch runs fork`).",
        TRACE,
        findings.reward_falls,
    ),
    Rule(
        "large_gradient",
        "train/grad_norm",
        "gradient norm above twice learner.grad_clip, or ten times the median of eight steps",
        "A few trajectories dominate the update, or lr is too high.",
        "Look at the step's advantages; lower lr.",
        TRACE,
        findings.large_gradient,
    ),
    Rule(
        "drifts",
        "train/kl_reference",
        "train/kl_reference above 0.2 nats",
        "The policy has moved far from the model it began as.",
        "Raise loss.kl_coef, or lower lr.",
        "cusearch dashboard {run}",
        findings.drifts,
    ),
    Rule(
        "searches_fail",
        "rollout/search_failures",
        "more than 0.2 of the attempts to search fail",
        "The retriever is overloaded, unreachable, or answers what cannot be read.",
        "Look at the retriever's log; lower retriever.max_connections.",
        "cusearch check {run}/config.toml",
        findings.searches_fail,
    ),
    Rule(
        "episodes_fail",
        "buffer/incomplete_groups",
        "as many incomplete groups since the last step as half of pool.questions, or more",
        "Most episodes end in an error: environment, reward or retriever.",
        "Read the worker's log.",
        "cusearch buckets {run}/config.toml --ledger",
        findings.episodes_fail,
    ),
    Rule(
        "wasted_turns",
        "episode/turns",
        "more than 0.3 turns an episode that are neither a search nor an answer, where both are counted: with less "
        "than 0.9 in the format, or 0.3 more than at first",
        "The policy does not keep the format.",
        "Warm-start the model, or show the format in the prompt template.",
        TRACE,
        findings.wasted_turns,
    ),
    Rule(
        "turns_are_cut",
        "episode/cut_turns",
        "more than 0.1 of the turns cut off, in three steps",
        "Turns end before their tag, which makes their episodes invalid.",
        "Raise episode.max_turn_tokens.",
        TRACE,
        findings.turns_are_cut,
    ),
    Rule(
        "workers_gone",
        "rollout/workers",
        "fewer than half as many workers as in the twenty steps before, in two steps",
        "Rollout workers have ended or hang.",
        "Start them again; a worker that hangs is named by `buckets`.",
        "cusearch buckets {run}/config.toml --workers",
        findings.no_worker,
    ),
    Rule(
        "slow_worker",
        "rollout/slowest_share",
        "a worker samples less than 0.2 of the median worker's tokens per second of a request, in three steps",
        "One worker's machine is overloaded or throttled: pools in ticket order wait for its episodes.",
        "Look at its machine. One that was started by hand may be ended: its tickets go to others.",
        "cusearch buckets {run}/config.toml --workers",
        findings.slow_worker,
    ),
    Rule(
        "slow_publishing",
        "time/lent_s",
        "more than 0.3 of a step, and a second, waiting until earlier weights are written, in three steps",
        "Writing a version takes longer than a step: the disk is slow, or busy.",
        "Put weights.folder into /dev/shm, or raise learner.publish_every.",
        "cusearch check {run}/config.toml",
        findings.slow_publishing,
    ),
    Rule(
        "buffer_full",
        "buffer/bytes",
        "buffered payloads above 0.9 of redis.max_mib",
        "Workers will soon wait for room.",
        "Raise redis.max_mib; look whether the learner runs.",
        "cusearch buckets {run}/config.toml --once",
        findings.buffer_full,
    ),
    Rule(
        "redis_full",
        "buffer/server_share",
        "the Redis server uses more than 0.9 of its maxmemory",
        "Redis will soon refuse to store.",
        "Raise maxmemory; or lower redis.max_mib, and learner.checkpoint_every, whose steps' pools are kept.",
        "cusearch buckets {run}/config.toml --once",
        findings.redis_full,
    ),
    Rule(
        "machine_full",
        "machine/disk_free_gib",
        "less than 2 GiB of disk free, or more than 0.95 of the memory used in three steps",
        "The next checkpoint may fail, or the kernel may end a process.",
        "Delete old checkpoints or records; lower learner.keep_checkpoints.",
        "cusearch check",
        findings.machine_full,
    ),
    Rule(
        "finds_nothing",
        "episode/recall_of_searched",
        "less than 0.02 of the evidence shown where the agent searches, in three steps",
        "The retriever answers rubbish, or serves another corpus than the questions'.",
        "Look at what a search answers.",
        TRACE,
        findings.finds_nothing,
    ),
    Rule(
        "trajectories_lost",
        "buffer/lost",
        "buffer/lost or buffer/quarantined grows",
        "Trajectories have disappeared from Redis, could not be read, or were set aside by hand.",
        "Look for eviction or other users of this Redis; `buffer quarantine` shows what was kept.",
        "cusearch buckets {run}/config.toml --ledger",
        findings.lost,
    ),
)
