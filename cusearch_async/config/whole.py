"""All sections together, and the rules between them."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from cusearch_async.algorithm.methods import PlansRollouts
from cusearch_async.config.episode import EnvironmentConfig, EpisodeConfig
from cusearch_async.config.method import MethodConfig, PoolConfig
from cusearch_async.config.redis import RedisConfig
from cusearch_async.config.retriever import RetrieverConfig
from cusearch_async.config.rollout import RolloutConfig
from cusearch_async.config.run import DataConfig, EvalConfig, ModelConfig, RunConfig, WeightsConfig
from cusearch_async.config.section import LABEL, Section
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
    def uses_retriever(self) -> bool:
        """Whether any environment of the run searches."""
        return any(environment.kind.uses_retriever for environment in self.environment.values())

    def environments(self, search: Search) -> dict[str, Environment]:
        """The environments by label, with `search` as their retriever."""
        return {label: settings.make(search) for label, settings in self.environment.items()}

    def sources_of(self, label: str) -> tuple[str, ...]:
        """Where the questions of an environment come from; empty for those that it brings itself."""
        environment = self.environment[label]
        return () if environment.has_own_questions else environment.source or self.data.source

    @property
    def evaluated_in(self) -> str:
        """The label of the environment that held-out questions are played in."""
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
        if self.evaluated_in not in self.environment:
            raise ValueError(
                f"eval.environment {self.eval.environment!r} must be one of the run's: {', '.join(self.environment)}"
            )
        n_g, k, m = self.pool.size, self.method.budget, self.loss.minibatch
        if k > n_g:
            raise ValueError(
                f"method.budget (K = {k}) must be <= pool.questions x pool.rollouts (N G = {n_g}); "
                "lower it or raise those"
            )
        if k % m:
            raise ValueError(f"method.budget (K = {k}) must be a multiple of loss.minibatch (M = {m})")
        if k > self.questions_per_step * self.pool.rollouts:
            raise ValueError(
                f"method.budget (K = {k}) must be a multiple of pool.rollouts (G = {self.pool.rollouts}) for "
                f"{self.method.name}, which generates K / G groups per step"
            )
        if self.rollout.max_episodes < self.largest_group:
            raise ValueError(
                f"rollout.max_episodes ({self.rollout.max_episodes}) must be >= {self.largest_group}, the largest "
                f"group that {self.method.name} makes: a worker plays whole groups"
            )
        needed = self.learner.publish_every - 1
        if self.pool.max_staleness < needed:
            raise ValueError(
                f"pool.max_staleness ({self.pool.max_staleness}) must be >= learner.publish_every - 1 ({needed}): "
                "workers would wait for weights that are never published"
            )
        least = (self.pool.max_staleness + 2) * n_g
        if self.buffer_limit < least:
            raise ValueError(
                f"redis.max_trajectories ({self.redis.max_trajectories}) must be >= "
                f"(pool.max_staleness + 2) N G = {least}"
            )
        if self.loss.correction_low > self.loss.correction_bound:
            raise ValueError(
                f"loss.correction_low ({self.loss.correction_low}) must be <= "
                f"loss.correction_high ({self.loss.correction_bound})"
            )
        return self

    @model_validator(mode="after")
    def _can_colocate(self) -> Config:
        learner = self.learner
        has_reference = self.loss.kl_coef > 0 and not learner.lora.rank
        _refuse(
            "run.colocate",
            self.run.colocate,
            (learner.nodes > 1, f"learner.nodes = 1, got {learner.nodes}: the GPUs are locked on one machine"),
            (
                learner.zero_stage not in (1, 2),
                f"learner.zero_stage = 1 or 2, got {learner.zero_stage}: DeepSpeed moves no other's optimizer",
            ),
            (has_reference and learner.reference != "cpu", "learner.reference = 'cpu': it would stay on the GPU"),
            (learner.deepspeed.offload("offload_optimizer"), "no zero_optimization.offload_optimizer: all is moved"),
            (learner.deepspeed.offload("offload_param"), "no zero_optimization.offload_param: all is moved"),
        )
        return self

    @model_validator(mode="after")
    def _can_compile(self) -> Config:
        learner = self.learner
        _refuse(
            "learner.compile",
            learner.compile,
            (learner.zero_stage == 3, "learner.zero_stage at most 2, got 3: DeepSpeed gathers weights layer by layer"),
            (learner.lora.rank > 0, f"learner.lora.rank = 0, got {learner.lora.rank}"),
            (
                learner.gradient_checkpointing,
                "learner.gradient_checkpointing = false: it may compute another code again",
            ),
            (learner.attention != "sdpa", f"learner.attention = 'sdpa', got {learner.attention!r}"),
        )
        return self

    @model_validator(mode="after")
    def _can_add_up_in_float32(self) -> Config:
        learner = self.learner
        stays = not learner.deepspeed.offload("offload_optimizer")
        _refuse(
            "learner.deepspeed.grad_accum_dtype = 'fp32' with model.dtype = 'bfloat16'",
            learner.deepspeed.grad_accum_dtype == "fp32" and self.model.dtype == "bfloat16",
            (learner.zero_stage == 0, "learner.zero_stage = 2 or 3, got 0: DeepSpeed cannot do it there"),
            (
                learner.zero_stage == 1 and stays,
                "learner.zero_stage = 2 or 3, got 1: DeepSpeed takes another optimizer there, whose checkpoints cannot "
                "be continued",
            ),
        )
        return self

    @model_validator(mode="after")
    def _weights_have_a_way(self) -> Config:
        transport, url = self.weights.transport, self.weights.url
        if transport == "http" and url is None:
            raise ValueError("weights.transport is 'http', which needs weights.url, like http://10.0.0.5:29400")
        if transport == "folder" and url is not None:
            raise ValueError(f"weights.url is {url}, which is of no use without weights.transport = 'http'")
        return self

    @model_validator(mode="after")
    def _can_score_in_order(self) -> Config:
        step = self.learner.publish_every
        _refuse(
            "eval.in_order",
            self.eval.in_order,
            (self.eval.every == 0, "eval.every of 1 or more"),
            (self.eval.every % step > 0, f"eval.every to be a multiple of learner.publish_every ({step})"),
            (self.weights.transport == "http", "weights.transport = 'folder': what waits there outlives the learner"),
        )
        return self

    @model_validator(mode="after")
    def _engines_fit(self) -> Config:
        if self.learner.ranks % self.learner.nodes:
            raise ValueError(
                f"learner.ranks ({self.learner.ranks}) must be a multiple of learner.nodes ({self.learner.nodes}): "
                "each node has equally many"
            )
        for name, gpus, least, why in (
            ("learner.gpus", self.learner.gpus, self.learner.ranks_per_node, "one for each rank on a node"),
            # a host may have one of the run's workers alone
            (
                "rollout.gpus",
                self.rollout.gpus,
                self.rollout.vllm.tensor_parallel_size,
                "rollout.vllm.tensor_parallel_size for an engine",
            ),
        ):
            if len(set(gpus)) < len(gpus):
                raise ValueError(f"{name} {list(gpus)} names a GPU twice")
            if gpus and len(gpus) < least:
                raise ValueError(f"{name} {list(gpus)} must name at least {least}: {why}")
        if self.rollout.vllm.is_quantised and self.loss.correction == "none":
            raise ValueError(
                "loss.correction is 'none', but rollout.vllm quantises the engines, which then sample from another "
                "policy than the learner's; choose a correction"
            )
        if self.learner.lora.rank and self.rollout.vllm.quantization:
            raise ValueError(
                f"learner.lora.rank is {self.learner.lora.rank}, but rollout.vllm.quantization = "
                f"{self.rollout.vllm.quantization!r}: the engine would add the adapter to other weights than the "
                "learner does; remove one of them"
            )
        if self.learner.deepspeed.offload("offload_param") and self.learner.zero_stage != 3:
            raise ValueError(
                "learner.deepspeed.zero_optimization.offload_param needs learner.zero_stage = 3, got "
                f"{self.learner.zero_stage}"
            )
        return self


def _refuse(key: str, is_set: bool, *obstacles: tuple[bool, str]) -> None:
    """`obstacles` are (whether it is there, what the setting `key` needs instead). Raises: ValueError."""
    for is_there, needed in obstacles:
        if is_set and is_there:
            raise ValueError(f"{key} needs {needed}")
