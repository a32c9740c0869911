"""All sections together, and the rules between them."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from cusearch_async.algorithm.methods import PlansRollouts
from cusearch_async.config.alarms import AlarmsConfig
from cusearch_async.config.engines import RolloutConfig
from cusearch_async.config.episode import EnvironmentConfig, EpisodeConfig
from cusearch_async.config.method import MethodConfig, PoolConfig
from cusearch_async.config.redis import RedisConfig
from cusearch_async.config.retriever import RetrieverConfig
from cusearch_async.config.run import DataConfig, EvalConfig, ModelConfig, RunConfig, WeightsConfig
from cusearch_async.config.section import LABEL, Section, nearest
from cusearch_async.config.training import LearnerConfig, LossConfig
from cusearch_async.environments import Environment, Search


class Config(Section):
    run: RunConfig
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    episode: EpisodeConfig = EpisodeConfig()
    environment: dict[Annotated[str, Field(pattern=LABEL)], EnvironmentConfig] = Field(
        {"search": EnvironmentConfig()}, min_length=1
    )
    pool: PoolConfig = PoolConfig()
    method: MethodConfig = MethodConfig()
    loss: LossConfig = LossConfig()
    learner: LearnerConfig = LearnerConfig()
    rollout: RolloutConfig = RolloutConfig()
    weights: WeightsConfig = WeightsConfig()
    redis: RedisConfig = RedisConfig()
    retriever: RetrieverConfig = RetrieverConfig()
    eval: EvalConfig = EvalConfig()
    alarms: AlarmsConfig = AlarmsConfig()

    @property
    def folder(self) -> Path:
        return self.run.folder or Path("runs") / self.run.name

    @property
    def folders(self) -> tuple[Path, ...]:
        """What the run writes into: its folder, and that of the weights if it is another."""
        return (self.folder,) if self.weights.folder is None else (self.folder, self.weights.folder)

    @property
    def weights_folder(self) -> Path:
        """Where the weight versions are."""
        return (self.weights.folder or self.folder) / "weights"

    @property
    def searching(self) -> list[str]:
        """The labels of the environments that ask the retriever."""
        return [label for label, found in self.environment.items() if found.kind.needs_retriever(found.own)]

    def environments(self, search: Search) -> dict[str, Environment]:
        """The environments by label, with `search` as their retriever."""
        return {label: settings.make(search) for label, settings in self.environment.items()}

    def sources_of(self, label: str) -> tuple[str, ...]:
        """Where the questions of an environment come from; empty for those that it brings itself."""
        environment = self.environment[label]
        return () if environment.has_own_questions else environment.source or self.data.source

    @property
    def evaluated_in(self) -> str:
        """The label of the environment for held-out questions."""
        return self.eval.environment or next(iter(self.environment))

    @cached_property
    def questions_per_step(self) -> int:
        """Groups that the method generates per step: N, or K / G."""
        method = self.method.make()
        n, g = self.pool.questions, self.pool.rollouts
        return method.questions(n, g) if isinstance(method, PlansRollouts) else n

    @cached_property
    def largest_group(self) -> int:
        """Largest group that the method makes, in rollouts."""
        method = self.method.make()
        return method.largest_group(self.pool.rollouts) if isinstance(method, PlansRollouts) else self.pool.rollouts

    @property
    def has_budget(self) -> bool:
        """Whether the method trains on K trajectories, or generates as many."""
        return not self.method.make().uses_whole_pool or self.questions_per_step != self.pool.questions

    @property
    def buffer_limit(self) -> int:
        """Maximum number of buffered trajectories."""
        return self.redis.max_trajectories or (self.pool.max_staleness + 2) * self.pool.size

    @field_validator("environment", mode="before")
    @classmethod
    def _has_labels(cls, given: Any) -> Any:
        if isinstance(given, dict):
            loose = [key for key, value in given.items() if not isinstance(value, dict | EnvironmentConfig)]
            if loose:
                raise ValueError(
                    f"{loose[0]} = {given[loose[0]]!r} belongs to an environment, and each has a label of your choice: "
                    "write [environment.search] above it, not [environment]"
                )
        return given

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        n_g, g, k, m = self.pool.size, self.pool.rollouts, self.method.budget, self.loss.minibatch
        has_budget = self.has_budget
        name, staleness, published = self.method.name, self.pool.max_staleness, self.learner.publish_every - 1
        largest, low, high = self.largest_group, self.loss.correction_low, self.loss.correction_bound
        transport, url = self.weights.transport, self.weights.url
        remotes = sorted({one.own.remote for one in self.environment.values() if getattr(one.own, "remote", "")})
        _require(len(remotes) < 2, f"environment.LABEL.remote must be the same for all, got {', '.join(remotes)}")
        for number, (label, environment) in enumerate(self.environment.items()):
            near = nearest(label, [*self.environment][:number], 0.85)
            _require(
                "name" in environment.model_fields_set or not near,
                f"environment.{label}: did you mean {near}? An environment beside it needs its name",
            )
        _require(
            self.evaluated_in in self.environment,
            f"eval.environment {self.eval.environment!r} must be one of the run's: {', '.join(self.environment)}",
        )
        _require(
            k <= n_g or not has_budget,
            f"method.budget (K = {k}) must be <= pool.questions x pool.rollouts (N G = {n_g}); lower it or raise those",
        )
        _require(
            k % m == 0 or not has_budget, f"method.budget (K = {k}) must be a multiple of loss.minibatch (M = {m})"
        )
        _require(
            k <= self.questions_per_step * g or not has_budget,
            f"method.budget (K = {k}) must be a multiple of pool.rollouts (G = {g}) for {name}, which generates K / G "
            "groups per step",
        )
        _require(
            self.rollout.max_episodes >= largest,
            f"rollout.max_episodes ({self.rollout.max_episodes}) must be >= {largest}, the largest group that {name} "
            "makes: a worker generates whole groups",
        )
        _require(
            staleness >= published,
            f"pool.max_staleness ({staleness}) must be >= learner.publish_every - 1 ({published}): workers would wait "
            "for weights that are never published",
        )
        least = (staleness + 2) * n_g
        _require(
            self.buffer_limit >= least,
            f"redis.max_trajectories ({self.redis.max_trajectories}) must be >= (pool.max_staleness + 2) N G = {least}",
        )
        _require(
            low <= high or self.loss.correction not in ("icepop", "geometric"),
            f"loss.correction_low ({low}) must be <= loss.correction_high ({high})",
        )
        _require(
            transport != "http" or url is not None,
            "weights.transport is 'http', which needs weights.url, like http://10.0.0.5:29400",
        )
        _require(
            transport not in ("folder", "object") or url is None,
            f"weights.url is {url}, which is of no use without weights.transport = 'http'",
        )
        _require(
            transport != "object" or self.weights.objects is not None,
            "weights.transport is 'object', which needs weights.objects, like s3://bucket/prefix",
        )
        _require(
            transport not in ("folder", "http") or self.weights.objects is None,
            f"weights.objects is {self.weights.objects}, which is of no use without weights.transport = 'object'",
        )
        _require(
            self.weights.upstream is None or (url is not None and url != self.weights.upstream),
            f"weights.upstream ({self.weights.upstream}) needs weights.url, another address, where the relay listens",
        )
        return self

    @model_validator(mode="after")
    def _learner_can(self) -> Config:
        learner, stage, offloaded = self.learner, self.learner.zero_stage, self.learner.deepspeed.offload
        has_reference = self.loss.kl_coef > 0 and not learner.lora.rank
        if self.run.colocate:
            _need(
                "run.colocate",
                (learner.nodes == 1, f"learner.nodes = 1, got {learner.nodes}: the GPUs are locked on one machine"),
                (stage in (1, 2), f"learner.zero_stage = 1 or 2, got {stage}: DeepSpeed moves no other's optimizer"),
                (
                    not has_reference or learner.reference == "cpu",
                    "learner.reference = 'cpu': it would stay on the GPU",
                ),
                (not offloaded("offload_optimizer"), "no zero_optimization.offload_optimizer: all is moved"),
            )
        _require(
            learner.trained_layers is None or not learner.lora.rank,
            f"learner.trained_layers ({learner.trained_layers}) must not be set with learner.lora.rank "
            f"({learner.lora.rank}): the adapter alone is trained",
        )
        _require(
            learner.attention != "flash_attention_2" or self.model.dtype == "bfloat16",
            f"learner.attention 'flash_attention_2' needs model.dtype = 'bfloat16', got {self.model.dtype!r}",
        )
        if learner.compile:
            _need(
                "learner.compile",
                (stage < 3, "learner.zero_stage at most 2, got 3: DeepSpeed gathers weights layer by layer"),
                (not learner.lora.rank, f"learner.lora.rank = 0, got {learner.lora.rank}"),
                (
                    not learner.gradient_checkpointing,
                    "learner.gradient_checkpointing = false: it may compute another code again",
                ),
                (learner.attention == "sdpa", f"learner.attention = 'sdpa', got {learner.attention!r}"),
            )
        _require(
            learner.deepspeed.grad_accum_dtype != "bf16" or self.model.dtype == "bfloat16" or stage > 0,
            "learner.deepspeed.grad_accum_dtype = 'bf16' needs model.dtype = 'bfloat16', or learner.zero_stage above 0",
        )
        if learner.deepspeed.grad_accum_dtype == "fp32" and self.model.dtype == "bfloat16":
            # DeepSpeed's optimizer for stage 1 without offload has a state that no resume can load
            _need(
                "learner.deepspeed.grad_accum_dtype = 'fp32' with model.dtype = 'bfloat16'",
                (
                    stage > 1 or (stage == 1 and offloaded("offload_optimizer")),
                    f"learner.zero_stage = 2 or 3, got {stage}",
                ),
            )
        _require(
            not offloaded("offload_param") or stage == 3,
            f"learner.deepspeed.zero_optimization.offload_param needs learner.zero_stage = 3, got {stage}",
        )
        _require(
            not offloaded("offload_optimizer") or stage > 0,
            f"learner.deepspeed.zero_optimization.offload_optimizer needs learner.zero_stage = 1, 2 or 3, got {stage}",
        )
        _require(
            learner.ranks % learner.nodes == 0,
            f"learner.ranks ({learner.ranks}) must be a multiple of learner.nodes ({learner.nodes}): each node has "
            "equally many",
        )
        return self

    @model_validator(mode="after")
    def _engines_fit(self) -> Config:
        step, lora, vllm = self.learner.publish_every, self.learner.lora, self.rollout.vllm
        if self.eval.in_order:
            _need(
                "eval.in_order",
                (self.eval.every > 0, "eval.every of 1 or more"),
                (self.eval.every % step == 0, f"eval.every to be a multiple of learner.publish_every ({step})"),
                (
                    self.weights.transport != "http",
                    "weights.transport = 'folder' or 'object': the weights outlive the learner",
                ),
            )
        for name, gpus, least, why in (
            ("learner.gpus", self.learner.gpus, self.learner.ranks_per_node, "one for each rank on a node"),
            # a host may have one of the run's workers alone
            ("rollout.gpus", self.rollout.gpus, vllm.tensor_parallel_size, "rollout.vllm.tensor_parallel_size"),
            (
                "eval.gpus",
                self.eval.gpus if self.eval.every else (),
                vllm.tensor_parallel_size,
                "rollout.vllm.tensor_parallel_size",
            ),
        ):
            _require(len(set(gpus)) == len(gpus), f"{name} {list(gpus)} names a GPU twice")
            _require(not gpus or len(gpus) >= least, f"{name} {list(gpus)} must name at least {least}: {why}")
        _require(
            not vllm.is_quantised or self.loss.correction != "none",
            "loss.correction is 'none', but rollout.vllm quantises the engines, which then sample from another policy "
            "than the learner's; choose a correction",
        )
        _require(
            not (lora.rank and vllm.quantization),
            f"learner.lora.rank is {lora.rank}, but rollout.vllm.quantization = {vllm.quantization!r}: the engine "
            "would add the adapter to other weights than the learner does; remove one of them",
        )
        return self


def _require(holds: bool, problem: str) -> None:
    """Raises: ValueError unless it holds."""
    if not holds:
        raise ValueError(problem)


def _need(key: str, *rules: tuple[bool, str]) -> None:
    """`rules`: what the setting `key` needs, and whether it holds. Raises: ValueError."""
    for holds, needed in rules:
        _require(holds, f"{key} needs {needed}")
