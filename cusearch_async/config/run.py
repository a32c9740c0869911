"""Settings of the run, its model, its data and its evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from cusearch_async.config.section import (
    NAME,
    Dtype,
    Folder,
    Free,
    Location,
    Numbers,
    Section,
    Shared,
    Sources,
    base_url,
    check_url,
)

STARTER = Path(__file__).parents[1] / "atlas" / "starter"
"""The shipped policy of the atlas world."""
STARTERS = {"atlas": STARTER, "atlas-hard": STARTER.with_name("starter_hard")}
"""The shipped policies, by what model.path calls them."""


class RunConfig(Section):
    name: str = Field(pattern=NAME)
    """Name of the run; its keys in Redis are `cusearch:{name}:…`."""
    steps: Free[int] = Field(203, ge=0)
    """Number of learner steps; each consumes one pool."""
    seed: Shared[int] = Field(0, ge=0)
    """Seed of the order of the questions, of all draws of a method and of all sampled tokens."""
    folder: Free[Folder | None] = None
    """Folder for checkpoints, weights, logs and metrics; None for runs/{name}."""
    take_turns: Free[bool] = False
    """Learner and engines have the same GPUs in turn, all on one machine: the engines sleep while the learner trains,
    and its weights and optimizer wait in the host's memory while they play. Otherwise each needs GPUs of its own, or a
    share of them (rollout.vllm.gpu_memory_utilization)."""
    gpu_gib: Free[float | None] = Field(None, gt=0, allow_inf_nan=False)
    """Memory of one GPU in GiB, for `cusearch check` on a machine without GPUs; None for 80."""
    records_mib: Free[int] = Field(512, ge=0)
    """Maximum size of the records of the steps (pool, selection, advantages), which `cusearch replay` and `trace` read;
    the oldest are deleted. 0 for none."""
    wait_s: Free[float] = Field(60.0, gt=0)
    """How long a process waits at its start for Redis and the retriever."""
    stall_s: Free[float] = Field(1800.0, gt=0)
    """The learner exits with Stalled and a report when no trajectory is finished for this long. With several ranks it
    also ends when one of them does not report for this long, and names that rank."""


class ModelConfig(Section):
    path: Location = "atlas"
    """A Hugging Face id, a local folder, or `atlas` or `atlas-hard` for a shipped starter policy."""
    dtype: Shared[Dtype] = "bfloat16"
    """Data type of the policy's weights and computation; the optimizer keeps float32 master weights."""
    chat_template: Shared[dict[str, bool | int | float | str]] = Field({})
    """Arguments of the tokenizer's chat template, like {enable_thinking = false}; which there are, its text says."""

    @field_validator("chat_template")
    @classmethod
    def _are_arguments(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        for name in arguments:
            if name in ("messages", "conversation", "tokenize", "add_generation_prompt"):
                raise ValueError(f"chat_template.{name} is set by the run; remove it")
        return arguments

    @property
    def location(self) -> str:
        """The model to load: a local folder or a Hub id."""
        return str(STARTERS.get(self.path, self.path))


class WeightsConfig(Section):
    folder: Free[Folder | None] = None
    """Folder for the published weights, of this run only and shared by all its processes; None for the run's. On one
    machine, one in /dev/shm keeps them off the disk."""
    transport: Free[str] = "folder"
    """How workers get published weights: `folder`, which they share with the learner; `http`, from the learner's
    machine at weights.url; or a class of your own as package.module:Name (`weights.interface.WeightTransport`)."""
    url: Free[str | None] = None
    """Where the learner listens with weights.transport `http`: an address of its machine, like http://10.0.0.5:29400.
    The bearer token is CUSEARCH_WEIGHTS_TOKEN, or in the run folder's file weights-token."""

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str | None) -> str | None:
        if url is not None:
            url = base_url(url)
            check_url(url, ("http",), "http://10.0.0.5:29400")
        return url


class DataConfig(Section):
    source: Sources = Field(("atlas",), min_length=1)
    """One or more of: `atlas`, `atlas-hard`, `atlas-hard-shallow`, a .parquet file in the schema of Search-R1 or VERL,
    a .jsonl, .json, .csv or .tsv file of "question" and "golden_answers", or hf:OWNER/NAME/FILE for such a file on the
    Hugging Face Hub. All their questions form one dataset; every epoch visits each question once."""


class JudgeConfig(Section):
    """A language model that judges answers in `cusearch eval`, beside exact match."""

    url: Free[str | None] = None
    """URL of an OpenAI-compatible server, like http://127.0.0.1:8001/v1; None for no judge. Its key, if it needs one,
    comes from CUSEARCH_JUDGE_KEY."""
    model: Free[str] = ""
    """Model name in the request; a server with one model ignores it."""
    at_once: Free[int] = Field(8, ge=1)
    """Verdicts that are asked for at once."""
    timeout_s: Free[float] = Field(60.0, gt=0)
    """Longest wait for a verdict; it is asked for three more times."""

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str | None) -> str | None:
        if url is not None:
            url = base_url(url, "/chat/completions")
            check_url(url, ("http", "https"), "http://127.0.0.1:8001/v1", "set CUSEARCH_JUDGE_KEY instead")
        return url


class EvalConfig(Section):
    suite: Free[Sources] = ()
    """Benchmarks (nq, triviaqa, popqa, hotpotqa, 2wikimultihopqa, musique, bamboogle) or question files; empty for
    atlas's held-out cities."""
    folder: Free[Location] = "hf:RUC-NLPIR/FlashRAG_datasets"
    """Where the benchmarks are, as NAME/SPLIT.jsonl: a local folder, or hf:OWNER/NAME."""
    limit: Free[int | None] = Field(None, ge=1)
    """Maximum number of questions per benchmark, the same ones whatever run.seed is. None for all."""
    environment: Free[str] = ""
    """The label of the environment that held-out questions are played in; empty for the first."""
    questions_per_category: Free[int] = Field(60, ge=1)
    """Held-out questions of atlas per number of links."""
    every: Free[int] = Field(0, ge=0)
    """Learner steps between two versions that the evaluator scores; 0 for no evaluator."""
    in_order: Free[bool] = False
    """Score every version that is a multiple of `every`, however late: the learner keeps their weights. Otherwise the
    newest one is scored, and an evaluator that is slower than the learner skips some."""
    at_once: Free[int] = Field(16, ge=1)
    """Episodes that the evaluator plays at once. It shares the retriever with the run."""
    cores: Free[Numbers] = ()
    """CPU cores of the evaluator; empty for all."""
    gpus: Free[Numbers] = ()
    """CUDA devices of the evaluator. Empty: the first free ones."""
    judge: JudgeConfig = JudgeConfig()

    def keeps(self, version: int) -> bool:
        """Whether the weights of a version are kept to be scored."""
        return self.in_order and self.every > 0 and version % self.every == 0
