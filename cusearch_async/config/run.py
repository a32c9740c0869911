"""Settings of the run, its model, its data and its evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from cusearch_async.config.section import (
    NAME,
    Dtype,
    Folder,
    Free,
    Location,
    Numbers,
    ObjectsUrl,
    Section,
    Shared,
    Sources,
    service_url,
)
from cusearch_async.extensions import Names

STARTER = Path(__file__).parents[1] / "atlas" / "starter"
"""The shipped policy of the atlas world."""
STARTERS = {"atlas": STARTER, "atlas-hard": STARTER.with_name("starter_hard")}
"""The shipped policies, by what model.path calls them."""


class RunConfig(Section):
    name: str = Field(pattern=NAME)
    """Name of the run; its keys in Redis are `cusearch:{name}:…`."""
    steps: Free[int] = Field(203, ge=0)
    """Learner steps; each consumes one pool."""
    seed: Shared[int] = Field(0, ge=0, lt=1 << 63)
    """Seed of question order, selection and sampling."""
    folder: Free[Folder | None] = None
    """Folder for checkpoints, weights, logs and metrics; None: runs/{name}."""
    colocate: Free[bool] = False
    """Learner and engines use the same GPUs of one machine in turn; what does not compute waits in host memory.
    Otherwise each needs its own GPUs, or a share of them (rollout.vllm.gpu_memory_utilization)."""
    gpu_gib: Free[float | None] = Field(None, gt=0, allow_inf_nan=False)
    """Memory of one GPU in GiB, for `cusearch check` on a machine without GPUs; None: 80."""
    records_mib: Free[int] = Field(512, ge=0)
    """Maximum size of the step records for `cusearch replay` and `trace`; the oldest are deleted. 0: none."""
    note: Free[str] = ""
    """What this run is about, in a line; for its page and its trackers."""
    tags: Free[Names] = ()
    """Words to find it by, with `cusearch runs --tag` and in trackers."""
    trackers: Free[Names] = ()
    """Where the figures of every step and the scores of versions are sent: `wandb`, `trackio`, `mlflow`, or a class of
    your own (`package.module:Name`)."""
    wait_s: Free[float] = Field(60.0, gt=0)
    """How long a process waits for Redis and the retriever at its start."""
    stall_s: Free[float] = Field(1800.0, gt=0)
    """The learner exits with Stalled, and a report, when no episode ends, or a rank is silent, for this long; an
    engine that has requests and produces no token is ended, and in half of that a worker that can load no weights."""


class ModelConfig(Section):
    path: Location = "atlas"
    """A Hugging Face id, a local folder, or the shipped starter policy `atlas` or `atlas-hard`."""
    dtype: Shared[Dtype] = "bfloat16"
    """Data type of the policy's weights and computation; the optimizer keeps float32 master weights."""
    chat_template: Shared[dict[str, bool | int | float | str]] = Field({})
    """Arguments of the tokenizer's chat template, like {enable_thinking = false}. One that prints a date has 26 July
    2024."""
    uses_chat_template: Shared[bool] = True
    """Whether prompts are put into the tokenizer's chat template, if it has one."""

    @field_validator("chat_template", mode="before")
    @classmethod
    def _are_arguments(cls, arguments: Any) -> Any:
        for name, value in arguments.items() if isinstance(arguments, dict) else ():
            if not isinstance(value, bool | int | float | str):
                raise ValueError(f"chat_template.{name} must be a text, a number, true or false, got {value!r}")
            if name in ("messages", "conversation", "tokenize", "add_generation_prompt"):
                raise ValueError(f"chat_template.{name} is set by the run; remove it")
        return arguments

    @property
    def template_arguments(self) -> dict[str, bool | int | float | str] | None:
        """Those of the chat template; None where it is not used."""
        return self.chat_template if self.uses_chat_template else None

    @property
    def location(self) -> str:
        """The model to load: a local folder or a Hub id."""
        return str(STARTERS.get(self.path, self.path))


class WeightsConfig(Section):
    folder: Free[Folder | None] = None
    """Folder for published weights, of this run only; None for the run's. One in /dev/shm keeps them off the disk."""
    transport: Free[str] = "folder"
    """How workers get weights: `folder`, shared with the learner; `http`, from weights.url; `object`, from
    weights.objects; or a class of your own (`package.module:Name`)."""
    url: Free[Annotated[str, service_url("http://10.0.0.5:29400")] | None] = None
    """Where the learner listens with weights.transport `http`, like http://10.0.0.5:29400; for others perhaps https://,
    of a proxy before it. Its token is CUSEARCH_WEIGHTS_TOKEN, or in the run folder's file weights-token."""
    upstream: Free[Annotated[str, service_url("http://10.0.0.5:29400")] | None] = None
    """Where `cusearch worker relay` gets the versions that it serves at weights.url: the learner, or another relay."""
    objects: Free[ObjectsUrl | None] = None
    """The object store of weights.transport `object`, for this run only, like s3://bucket/prefix; also gs:// and
    az://. Endpoint and secrets are those of the environment: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, …"""


class DataConfig(Section):
    source: Sources = Field(("atlas",), min_length=1)
    """One or more of: `atlas`, `atlas-hard`, `atlas-hard-shallow`, `atlas-prose`, a question file (.parquet, .jsonl,
    .json, .csv, .tsv), or hf:OWNER/NAME/FILE for one on the Hugging Face Hub. An epoch visits each question once."""


_JUDGE_URL = service_url("http://127.0.0.1:8001/v1", "/chat/completions", "set CUSEARCH_JUDGE_KEY instead")


class JudgeConfig(Section):
    """A language model that judges answers in `cusearch eval`, in addition to exact match."""

    url: Free[Annotated[str, _JUDGE_URL] | None] = None
    """OpenAI-compatible server, like http://127.0.0.1:8001/v1, its key in CUSEARCH_JUDGE_KEY; None: no judge."""
    model: Free[str] = ""
    """Model name in the request; a server with one model ignores it."""
    at_once: Free[int] = Field(8, ge=1)
    """Concurrent requests for verdicts."""
    timeout_s: Free[float] = Field(60.0, gt=0)
    """Longest wait for a verdict, which is then requested again, three times."""


class EvalConfig(Section):
    suite: Free[Sources] = ()
    """Benchmarks (nq, triviaqa, popqa, hotpotqa, 2wikimultihopqa, musique, bamboogle) or question files; empty: atlas's
    held-out cities."""
    folder: Free[Location] = "hf:RUC-NLPIR/FlashRAG_datasets"
    """Where the benchmarks are, as NAME/SPLIT.jsonl: a local folder, or hf:OWNER/NAME."""
    limit: Free[int | None] = Field(None, ge=1)
    """Maximum number of questions of each of these, the same ones whatever run.seed is; None: all."""
    environment: Free[str] = ""
    """Label of the environment for held-out questions; empty: the first."""
    questions_per_category: Free[int] = Field(60, ge=1)
    """Held-out questions of atlas per number of links."""
    every: Free[int] = Field(0, ge=0)
    """Learner steps between two versions that the evaluator scores; 0: no evaluator."""
    in_order: Free[bool] = False
    """Score every version that is a multiple of `every`, however late; the learner keeps their weights. Otherwise a
    slow evaluator takes the newest version and skips some."""
    at_once: Free[int] = Field(16, ge=1)
    """Concurrent episodes of the evaluator, which shares the run's retriever."""
    cores: Free[Numbers] = ()
    """CPU cores of the evaluator; empty: all."""
    gpus: Free[Numbers] = ()
    """CUDA devices of the evaluator, numbered as in learner.gpus; empty: the first free ones."""
    judge: JudgeConfig = JudgeConfig()

    def keeps(self, version: int) -> bool:
        """Whether the weights of a version are kept to be scored."""
        return self.in_order and self.every > 0 and version % self.every == 0
