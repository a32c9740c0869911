"""The settings of a run: TOML file, then command-line overrides, checked before anything starts.

A file states only what differs from the defaults. Unknown keys, impossible combinations and lengths that do
not fit are errors that name the key, the value and what would be right. Secrets are not settings: the Redis
password comes from CUSEARCH_REDIS_PASSWORD, or from a private file of the Redis that was started for the run.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import parse_qs, urlsplit

import tomli_w
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from cusearch_async.algorithm.methods import METHODS, Method, MethodSettings, method_class
from cusearch_async.errors import ConfigError
from cusearch_async.files import write_whole
from cusearch_async.types import Aggregation, Correction, Proximal, RatioLevel, Singleton

_SENTINEL = re.compile(r"redis\+sentinel://(\w+@)?[^:/,@]+:\d+(,[^:/,@]+:\d+)*/[\w.-]+(/\d+)?")

STARTER = Path(__file__).parent / "atlas" / "starter"
"""The shipped policy of the atlas world."""

SHIPPED = Path(__file__).parent / "configs"
"""The configs that come with the package; each can be given by its name, like `atlas`."""
CONFIG_HELP = "a TOML file, or the name of a config that comes with the package, like atlas"
LOOPBACK = ("127.0.0.1", "localhost", "::1")

Dtype = Literal["float32", "bfloat16"]


_PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9_.-]*$": "must be letters, digits, '_', '.' and '-', the first a letter or digit",
    r"^(cpu|cuda(:\d+)?)$": "must be 'cpu', 'cuda' or 'cuda:N'",
}
"""What a text must match -> the same in words."""
_NAME, _DEVICE = _PATTERNS

_OTHER_NAMES = {
    "trainer": "learner",
    "training": "learner",
    "actor": "rollout",
    "learning_rate": "learner.lr",
    "max_grad_norm": "learner.grad_clip",
    "batch_size": "pool.questions",
    "train_batch_size": "pool.questions",
    "group_size": "pool.rollouts",
    "num_generations": "pool.rollouts",
    "beta": "loss.kl_coef",
    "max_steps": "run.steps",
    "total_steps": "run.steps",
    "epochs": "run.steps",
    "output_dir": "run.folder",
    "model_name_or_path": "model.path",
    "train_files": "data.source",
}
"""What other trainers call a key -> what it is called here."""
_ALIKE = 0.75
"""Share of two names that must agree for one to be a slip of the other."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, coerce_numbers_to_str=True, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Python's True is an integer; a config's `true` is none."""
        kind = cls.model_fields[info.field_name or ""].annotation
        parts = value if isinstance(value, list | tuple) else [value]
        if kind is not bool and any(isinstance(part, bool) for part in parts):
            raise ValueError(f"must not be true or false, got {str(value).lower()}")
        return value


class RunConfig(Section):
    name: str = Field(pattern=_NAME)
    """Names the run's keys in Redis, `cusearch:{name}:…`."""
    steps: int = Field(203, ge=0)
    """Learner steps; each consumes one pool."""
    seed: int = Field(0, ge=0)
    """Of the order of the questions, of every draw of a method and of every sampled token."""
    folder: Path | None = None
    """Where the run writes its checkpoints, weights, logs and metrics; None for runs/{name}."""
    wait_s: float = Field(60.0, gt=0)
    """How long a process that starts waits for Redis and the retriever, in whatever order they are started."""
    stall_s: float = Field(1800.0, gt=0)
    """The learner gives up, and says who waits for what, when no trajectory has been finished for so long. With several
    ranks it also ends, and names the rank, when one of them has said nothing for so long."""


class ModelConfig(Section):
    path: str = "atlas"
    """A Hugging Face id, a local folder, or `atlas` for the shipped starter policy."""
    dtype: Dtype = "bfloat16"
    """Of the policy's weights and computation; the optimizer keeps float32 masters."""

    @property
    def location(self) -> str:
        """What to load: a local folder or a Hub id."""
        return str(STARTER) if self.path == "atlas" else self.path


class DataConfig(Section):
    source: tuple[str, ...] = Field(("atlas",), min_length=1)
    """One or several of: `atlas`, a .parquet file in the schema of Search-R1 or VERL, a .jsonl file of {"question",
    "golden_answers"}, or hf:OWNER/NAME/FILE for such a file on the Hugging Face Hub. All their questions together are
    one dataset; every epoch visits each of them once."""

    @field_validator("source", mode="before")
    @classmethod
    def _one_is_enough(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class EpisodeConfig(Section):
    template: Literal["paper", "atlas"] = "paper"
    """The prompt, and what the environment says after a turn that neither searches nor answers. `atlas` is the
    short one that the starter policy was trained with."""
    s_max: int = Field(5, ge=1)
    """Most search turns of an episode, and the deepest bucket."""
    topk: int = Field(3, ge=1)
    """Documents per search."""
    temperature: float = Field(1.0, gt=0)
    """Of the sampling in rollouts; 1 samples from the policy as it is. Evaluation is greedy unless told otherwise."""
    max_prompt_tokens: int = Field(512, ge=1)
    """Longest prompt, template and question together. A longer question is an error before the run starts."""
    max_turn_tokens: int = Field(500, ge=1)
    """Most tokens that the policy may write in a turn."""
    max_observation_tokens: int = Field(500, ge=8)
    """Most tokens of a search result; the rest of its documents is cut off."""
    document_template: str = "Doc {rank}(Title: {title}) {text}\n"
    """One document of a search result; {rank} counts from 1, {title} is its first line, {text} the rest."""
    timeout_s: float = Field(600.0, gt=0)
    """An episode that takes longer is given up, and its ticket is tried again."""
    format_weight: float = Field(0.2, ge=0, le=1)
    """λ_f, the weight of a valid format in the reward."""

    @property
    def max_tokens(self) -> int:
        """The longest possible episode."""
        response = (self.s_max + 1) * self.max_turn_tokens + self.s_max * self.max_observation_tokens
        return self.max_prompt_tokens + response

    @property
    def max_observation_characters(self) -> int:
        """How much of what a search finds is looked at; no token of ordinary text is longer than 16 characters."""
        return 16 * self.max_observation_tokens

    @model_validator(mode="after")
    def _known_fields(self) -> EpisodeConfig:
        try:
            self.document_template.format(rank=1, title="", text="")
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(f"document_template may use {{rank}}, {{title}} and {{text}} only: {error!r}") from error
        return self


class PoolConfig(Section):
    questions: int = Field(64, ge=1)
    """N, groups per learner step."""
    rollouts: int = Field(3, ge=1)
    """G, trajectories per group."""
    order: Literal["ticket", "oldest_complete"] = "ticket"
    """Which groups make the next pool: those of the next N tickets, in their order (`ticket`), or the N complete
    groups with the oldest tickets, whichever are complete (`oldest_complete`)."""
    max_staleness: int = Field(2, ge=0)
    """Learner steps a trajectory may lag behind the policy that trains on it; 0 is the synchronous algorithm."""
    max_attempts: int = Field(5, ge=1)
    """Times that a ticket is tried (its worker dies, its episode takes too long) before its group is left
    incomplete."""

    @property
    def size(self) -> int:
        return self.questions * self.rollouts


class SharedMethodConfig(Section):
    """What all selection methods have; a method's own settings stand beside them."""

    model_config = ConfigDict(extra="allow")  # settings of a user's own method, which `_known` looks at

    name: str = "sdga_phase"
    """How a step's trajectories are chosen: sdga_phase, sdga_auto, sdga_anti, random, topk_reward, grpo_full,
    grpo_half, dapo or ar3po, or a method of your own as package.module:Class."""
    budget: int = Field(96, ge=1)
    """K, trajectories trained on per step."""
    singleton: Singleton = "raw"
    """Advantage of a trajectory that is alone in its group: `raw` its reward (VERL), `zero` none, `pool` by the
    mean and spread of its whole group before the selection."""
    advantage_std: bool = True
    """Divide advantages by the standard deviation of their group's rewards (GRPO); false only centres them (Dr. GRPO).
    """

    @model_validator(mode="after")
    def _known(self) -> SharedMethodConfig:
        own = method_class(self.name).Settings
        for name in self.model_extra or {}:
            if name not in own.model_fields:
                hint = _hint("method", name) or "; `cusearch config` lists all"
                raise ConfigError(f"method.{name}: unknown key{hint}")
        self.make()
        return self

    def make(self) -> Method[Any]:
        """The method. Raises: ConfigError when there is none of this name."""
        found = method_class(self.name)
        known = {name: getattr(self, name) for name in found.Settings.model_fields if hasattr(self, name)}
        return found(found.Settings.model_validate(known), self.budget)


if TYPE_CHECKING:
    MethodConfig = SharedMethodConfig
else:
    _OWN = dict.fromkeys(found.Settings for found in METHODS.values() if found.Settings is not MethodSettings)
    MethodConfig = create_model("MethodConfig", __base__=(*_OWN, SharedMethodConfig))


class LossConfig(Section):
    minibatch: int = Field(32, ge=1)
    """M, trajectories per optimizer step."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio to the proximal policy is clipped at 1 - clip_low …"""
    clip_high: float = Field(0.2, gt=0)
    """… and at 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """Where the advantage is negative, the loss of a token is at most this many times its size; None for no bound."""
    ratio: RatioLevel = "token"
    """`sequence` (GSPO) wants a much smaller clip (3e-4) and seq-mean-token-mean."""
    proximal: Proximal = "recomputed"
    """Where π_prox comes from; `loglinear` saves its forward pass."""
    kl_coef: float = Field(0.001, ge=0)
    """β; 0 loads no reference model."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of an entropy bonus, the entropy of the policy where it sampled a token; the paper's loss has none,
    ZeroSearch's is 0.001."""
    aggregation: Aggregation = "token-mean"
    """How the losses of tokens become one number, by VERL's names: the mean over all tokens (token-mean), the mean over
    trajectories of their means (seq-mean-token-mean), or of their sums divided by the most tokens of an episode
    (seq-mean-token-sum-norm)."""
    correction: Correction = "tis"
    """How the off-policy weight π_prox/μ is bounded: tis, icepop, mask, geometric or none."""
    correction_low: float = Field(0.5, ge=0)
    """Lower bound of icepop (per token) and geometric (per trajectory)."""
    correction_high: float | None = Field(None, gt=0)
    """Upper bound of all of them; None for 5 with mask and 2 with the others."""

    @property
    def correction_bound(self) -> float:
        """The upper bound of the off-policy weight: `correction_high`, or the correction's own."""
        if self.correction_high is not None:
            return self.correction_high
        return 5.0 if self.correction == "mask" else 2.0


class LearnerConfig(Section):
    lr: float = Field(1e-6, gt=0)
    """Learning rate of AdamW."""
    warmup_steps: int = Field(0, ge=0)
    """Learner steps over which the learning rate grows linearly."""
    weight_decay: float = Field(0.0, ge=0)
    """Of AdamW."""
    grad_clip: float = Field(1.0, gt=0)
    """Longest gradient, as a 2-norm over all parameters; a longer one is scaled down to it."""
    micro_batch_tokens: int = Field(16384, ge=1)
    """Tokens per forward pass and rank, padding included."""
    ranks: int = Field(1, ge=1)
    """Processes of the learner, one GPU each; they share every step's trajectories."""
    zero_stage: int = Field(1, ge=0, le=3)
    """DeepSpeed's ZeRO: 0 divides nothing among the ranks, 1 the optimizer state, 2 also gradients, 3 also weights."""
    packing: bool = False
    """Lay the trajectories of a forward pass end to end instead of padding them. Meant for flash_attention_2, which
    skips what lies between them; `sdpa` builds the whole mask (0.66 times as fast as padding on a CPU)."""
    attention: Literal["sdpa", "flash_attention_2"] = "sdpa"
    """Attention kernel of the learner; flash_attention_2 needs the flash-attn package and a GPU."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, a third more time."""
    checkpoint_every: int = Field(10, ge=1)
    """Learner steps between checkpoints; a run that was killed goes on from the newest."""
    keep_checkpoints: int = Field(2, ge=1)
    """Newest checkpoints that are kept; older ones are deleted."""
    publish_every: int = Field(1, ge=1)
    """Learner steps between published weight versions."""
    cores: tuple[int, ...] = ()
    """CPU cores of the learner; empty for all. Rank r takes its share of them in order."""
    gpus: tuple[int, ...] = ()
    """CUDA devices of the learner, one per rank; empty for all."""


class RolloutConfig(Section):
    workers: int = Field(1, ge=1)
    """Rollout workers that `cusearch launch` starts, each with an engine of its own."""
    max_episodes: int = Field(192, ge=1)
    """Episodes at play per worker; those that wait for room in the buffer are not counted."""
    max_sequences: int = Field(128, ge=1)
    """Sequences that the engine decodes at once."""
    kv_cache_mib: int | None = Field(None, ge=16)
    """KV-cache room; None leaves it to vLLM's share of the device memory."""
    block_size: int | None = None
    """Tokens in a block of vLLM's KV cache; None for vLLM's own choice."""
    enforce_eager: bool = False
    """Do not compile the model: it starts sooner and decodes more slowly on a GPU."""
    canary_every: int = Field(10, ge=1)
    """Published versions between two checks that the engine computes what the learner computes."""
    cores: tuple[int, ...] = ()
    """CPU cores of a worker, and with several workers split among them; empty for all."""
    gpus: tuple[int, ...] = ()
    """CUDA devices of the workers, one each in order; empty for all."""


def _check_url(url: str, schemes: tuple[str, ...], example: str) -> None:
    """Raises: ValueError naming the address and what one looks like."""
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        raise ValueError(f"url {url!r} must look like {example}")


class RedisConfig(Section):
    url: str = "redis://127.0.0.1:6379/0"
    """redis://, rediss:// (TLS) or redis+sentinel://HOST:PORT,HOST:PORT/SERVICE; with a user name if need be, without
    a password."""
    timeout_s: float = Field(10.0, gt=0)
    """Time for one answer; the command is then sent again."""
    outage_s: float = Field(120.0, ge=0)
    """How long a process waits for a Redis that does not answer, before it exits with BufferUnavailable."""
    lease_s: float = Field(60.0, gt=1)
    """A worker that has been silent for so long loses its tickets to others."""
    max_trajectories: int | None = Field(None, ge=1)
    """Most finished trajectories that wait in the buffer; None for (max_staleness + 2) N G."""
    max_mib: int = Field(4096, ge=1)
    """Most payload that waits in the buffer. Pools that are kept for recovery come on top."""

    @model_validator(mode="after")
    def _plain_url(self) -> RedisConfig:
        in_place = "@" in self.url and ":" in self.url.rpartition("@")[0].partition("//")[2]
        asked = parse_qs(self.url.partition("?")[2], keep_blank_values=True)
        if in_place or "password" in asked:
            raise ValueError("url must not hold a password; set CUSEARCH_REDIS_PASSWORD instead")
        if "username" in asked:
            raise ValueError("url names its user before the host, as redis://USER@HOST:PORT/0")
        if self.url.startswith("redis+sentinel://"):
            if not _SENTINEL.fullmatch(self.url):
                raise ValueError(f"url {self.url!r} must look like redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/0")
        else:
            _check_url(self.url, ("redis", "rediss"), "redis://127.0.0.1:6379/0")
        return self


class DenseConfig(Section):
    """The `dense` backend; the defaults are Search-R1's."""

    encoder: str = "intfloat/e5-base-v2"
    """A Hugging Face id or a local folder; any encoder that transformers' AutoModel loads."""
    query_prefix: str = "query: "
    """Put before a query; what the encoder was trained with."""
    passage_prefix: str = "passage: "
    """Put before a passage; what the encoder was trained with."""
    pooling: Literal["mean", "cls"] = "mean"
    """A text's vector: the mean over its tokens, or the first token's."""
    normalize: bool = True
    """Vectors of length 1: the inner product is the cosine."""
    max_query_tokens: int = Field(256, ge=1)
    """What is longer is cut off."""
    max_passage_tokens: int = Field(256, ge=1)
    """What is longer is cut off."""
    batch: int = Field(128, ge=1)
    """Texts that are encoded at once."""
    device: str = Field("cpu", pattern=_DEVICE)
    """Where the encoder and the reranker run: `cpu`, `cuda`, `cuda:1`, …"""
    kind: Literal["flat", "hnsw", "ivf"] = "flat"
    """Of the FAISS index."""
    probes: int = Field(64, ge=1)
    """ivf: lists that are searched per query. hnsw: the width of the search, at least topk."""


class RerankConfig(Section):
    """A cross-encoder that sorts again what bm25 or dense has found."""

    model: str | None = None
    """A Hugging Face id or a local folder (Search-R1's: cross-encoder/ms-marco-MiniLM-L12-v2); None for none."""
    candidates: int = Field(10, ge=1)
    """Documents that are found before the best topk of them are kept."""
    max_tokens: int = Field(512, ge=1)
    """Query and document together; what is longer is cut off."""


class ZeroSearchConfig(Section):
    """The `zerosearch` backend: a language model plays the search engine."""

    url: str = "http://127.0.0.1:6001/v1"
    """Of an OpenAI-compatible server. Its key, if it wants one, comes from CUSEARCH_SIMULATOR_KEY."""
    model: str = ""
    """Name that is sent; a server of one model ignores it."""
    mode: Literal["sft", "prompt"] = "sft"
    """sft: the short prompt of ZeroSearch's fine-tuned simulators; prompt: with an example, for any chat model."""
    p_start: float = Field(0.0, ge=0, le=1)
    """Probability that a search returns noisy documents, at the first step …"""
    p_end: float = Field(0.5, ge=0, le=1)
    """… and at the last step."""
    base: float = Field(4.0, gt=1)
    """b of p(i) = p_s + (b^(i/m) - 1) / (b - 1) (p_e - p_s)."""
    steps: int | None = Field(None, ge=1)
    """m; None for run.steps."""
    temperature: float = Field(0.8, ge=0)
    """Of the language model's sampling."""
    max_tokens: int = Field(600, ge=1)
    """Longest answer of the language model."""
    timeout_s: float = Field(25.0, gt=0)
    """For one answer of the language model."""

    @model_validator(mode="after")
    def _address(self) -> ZeroSearchConfig:
        _check_url(self.url, ("http", "https"), "http://127.0.0.1:6001/v1")
        return self


class WebConfig(Section):
    """The `serper` and `serpapi` backends; the key comes from SERPER_API_KEY or SERPAPI_API_KEY."""

    url: str | None = None
    """Another address of the service's search endpoint; None for its own."""
    per_second: float = Field(5.0, gt=0)
    """Requests to the service, at most."""
    max_requests: int | None = Field(None, ge=1)
    """Requests that a retriever process may spend, cached answers not counted; None for no cap."""
    attempts: int = Field(3, ge=1)
    """Times that a request is tried before the search fails."""
    timeout_s: float = Field(8.0, gt=0)
    """For one attempt."""
    cache: Path | None = None
    """A folder that keeps answers; None (the default, as training wants fresh noise) asks every time."""
    cache_ttl_s: float = Field(86400.0, gt=0)
    """A kept answer that is older is asked for again."""

    @model_validator(mode="after")
    def _address(self) -> WebConfig:
        if self.url is not None:
            _check_url(self.url, ("http", "https"), "https://google.serper.dev/search")
        return self


class RetrieverConfig(Section):
    url: str = "http://127.0.0.1:8000"
    """Where the retriever answers `POST /retrieve`; `cusearch launch` starts one there if nothing listens."""
    backend: Literal["bm25", "dense", "zerosearch", "serper", "serpapi"] = "bm25"
    """What searches: an index of our own (bm25, dense), a language model that plays a search engine (zerosearch),
    or the web (serper, serpapi)."""
    corpus: str = "atlas"
    """bm25 and dense: `atlas`, or a JSONL file of {"id", "contents"}."""
    index: Path | None = None
    """bm25 and dense: a folder that `cusearch index` has made; None makes the index in memory at start."""
    timeout_s: float = Field(30.0, gt=0)
    """A worker waits so long for the answer to one search, and then asks again."""
    max_connections: int = Field(256, ge=1)
    """Searches that one worker has on their way at once."""
    outage_s: float = Field(300.0, gt=0)
    """How long a worker retries a retriever that is down before it ends with RetrievalUnavailable."""
    max_answer_mib: int = Field(16, ge=1)
    """Longest answer to a search; one that is longer fails its episode."""
    distractors: int = Field(0, ge=0)
    """Of the topk documents, how many are replaced by random ones (never the first); bm25 and dense."""
    noise: float = Field(0.0, ge=0, le=1)
    """Probability that a search returns random documents only; bm25 and dense."""
    latency_median_s: float = Field(0.0, ge=0)
    """Half of all requests wait at least this long, to play a slow engine …"""
    latency_p99_s: float = Field(0.0, ge=0)
    """… and one in a hundred at least this long (log-normal); 0 for none."""
    dense: DenseConfig = DenseConfig()
    rerank: RerankConfig = RerankConfig()
    zerosearch: ZeroSearchConfig = ZeroSearchConfig()
    web: WebConfig = WebConfig()

    @property
    def is_deterministic(self) -> bool:
        """Equal queries get equal documents, whoever asks."""
        return self.backend in ("bm25", "dense") and not self.noise and not self.distractors

    @property
    def draws_by_request(self) -> bool:
        """Whether the retriever is ours and takes the random numbers of its noise and latency from the request. Other
        servers of the protocol may refuse a field that they do not know."""
        return self.backend == "zerosearch" or bool(self.noise or self.distractors or self.latency_median_s)

    @model_validator(mode="after")
    def _fits_together(self) -> RetrieverConfig:
        if self.latency_p99_s < self.latency_median_s:
            raise ValueError(
                f"latency_p99_s ({self.latency_p99_s}) must be >= latency_median_s ({self.latency_median_s})"
            )
        _check_url(self.url, ("http", "https"), "http://127.0.0.1:8000")
        if self.index is not None and self.corpus == "atlas":
            raise ValueError("index must not be set for the corpus 'atlas', which is indexed in memory")
        web_s = self.web.attempts * self.web.timeout_s
        for backends, name, takes_s in (
            (("zerosearch",), "zerosearch.timeout_s", self.zerosearch.timeout_s),
            (("serper", "serpapi"), "web.attempts x web.timeout_s", web_s),
        ):
            if self.backend in backends and takes_s >= self.timeout_s:
                raise ValueError(
                    f"timeout_s ({self.timeout_s:g}) must be more than {name} ({takes_s:g}): a worker would ask again "
                    "while its first search still runs"
                )
        return self


class EvalConfig(Section):
    suite: tuple[str, ...] = ()
    """Benchmarks (nq, triviaqa, popqa, hotpotqa, 2wikimultihopqa, musique, bamboogle) or question files; empty for
    atlas's held-out cities."""
    folder: str = "hf:RUC-NLPIR/FlashRAG_datasets"
    """Where the benchmarks are, as NAME/SPLIT.jsonl: a local folder, or hf:OWNER/NAME."""
    limit: int | None = Field(None, ge=1)
    """Questions per benchmark, the same ones for a run.seed; None for all."""
    questions_per_category: int = Field(60, ge=1)
    """Of atlas, by number of links."""
    every: int = Field(0, ge=0)
    """The evaluator scores a version every so many learner steps; 0 starts none."""
    at_once: int = Field(16, ge=1)
    """Episodes that the evaluator plays at once: it shares the retriever with the run."""
    cores: tuple[int, ...] = ()
    """CPU cores of the evaluator; empty for all."""
    gpus: tuple[int, ...] = ()
    """CUDA devices of the evaluator; empty for all."""


class Config(Section):
    run: RunConfig
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    episode: EpisodeConfig = EpisodeConfig()
    pool: PoolConfig = PoolConfig()
    method: MethodConfig = MethodConfig()
    loss: LossConfig = LossConfig()
    learner: LearnerConfig = LearnerConfig()
    rollout: RolloutConfig = RolloutConfig()
    redis: RedisConfig = RedisConfig()
    retriever: RetrieverConfig = RetrieverConfig()
    eval: EvalConfig = EvalConfig()

    @property
    def folder(self) -> Path:
        return self.run.folder or Path("runs") / self.run.name

    @property
    def questions_per_step(self) -> int:
        """Groups that the method generates per step: N, or K / G."""
        return self.method.make().questions(self.pool.questions, self.pool.rollouts)

    @property
    def largest_group(self) -> int:
        """Most rollouts that the method may give a question."""
        return self.method.make().largest_group(self.pool.rollouts)

    @property
    def buffer_limit(self) -> int:
        """Trajectories that may wait in the buffer."""
        return self.redis.max_trajectories or (self.pool.max_staleness + 2) * self.pool.size

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
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
                f"{self.method.name}, which generates K / G groups"
            )
        if self.rollout.max_episodes < self.largest_group:
            raise ValueError(
                f"rollout.max_episodes ({self.rollout.max_episodes}) must be >= {self.largest_group}, the largest "
                f"group that {self.method.name} makes: groups are played whole"
            )
        for name, gpus, processes in (
            ("learner.gpus", self.learner.gpus, self.learner.ranks),
            ("rollout.gpus", self.rollout.gpus, self.rollout.workers),
        ):
            if gpus and len(gpus) < processes:
                raise ValueError(f"{name} {list(gpus)} must name at least {processes}, one for each process")
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


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, or a shipped config by its name, and apply overrides like `["--learner.lr", "1e-6"]`.

    Raises: ConfigError, one line per mistake."""
    if not path.is_file():
        path = shipped_configs().get(path.as_posix(), path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"config file {path} does not exist; give {CONFIG_HELP}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {path} is not TOML: {error}") from error
    for key, value in _pairs(overrides):
        *parents, last = key.split(".")
        section = values
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise ConfigError(f"--{key}: {parent} is a value, not a section")
        section[last] = value
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(problem) for problem in error.errors())) from error


def shipped_configs() -> dict[str, Path]:
    """Name, like `atlas` or `paper/qwen2.5-3b-search-r1` -> file."""
    return {
        path.relative_to(SHIPPED).as_posix().removesuffix(".toml"): path for path in sorted(SHIPPED.rglob("*.toml"))
    }


def save_config(config: Config, path: Path) -> None:
    """Write the resolved settings, every key, as TOML that `load_config` reads back.

    Raises: ConfigError when the run's folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)).encode())
    except OSError as error:
        raise ConfigError(f"run.folder {path.parent} cannot be written: {error.strerror}; choose another") from error


def redis_password(config: Config) -> str | None:
    """CUSEARCH_REDIS_PASSWORD; else what `redis_password_file` holds; None where there is neither.

    Raises: ConfigError when there is such a file, and only other users may read it."""
    given = os.environ.get("CUSEARCH_REDIS_PASSWORD")
    path = redis_password_file(config)
    if given or path is None:
        return given or None
    try:
        return path.read_text(encoding="utf-8") or None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(
            f"{path}, the password of this run's Redis, cannot be read ({error.strerror}); be the user who started "
            "that Redis, or set CUSEARCH_REDIS_PASSWORD"
        ) from error


def redis_password_file(config: Config) -> Path | None:
    """Where the Redis that was started for this run has its password. None where redis.url cannot be that Redis: one
    on another machine, or with a user of its own."""
    parts = urlsplit(config.redis.url)
    if parts.scheme != "redis" or parts.hostname not in LOOPBACK or parts.username:
        return None
    return config.folder / "redis" / "password"


def explain_unknown(arguments: Sequence[str]) -> str:
    """What to say of arguments that are neither a command's own nor overrides."""
    for argument in arguments:
        if re.match(r"\w+\.[\w.]+=", argument):
            return f"{argument!r} is no option; settings are written --section.key value, so --{argument}"
    name = arguments[0].removeprefix("--").partition("=")[0].replace("-", "_")
    return f"{arguments[0]!r} is no option; settings are written --section.key value{_hint('', name, '--')}"


def _pairs(overrides: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """("learner.lr", 1e-6) from ["--learner.lr", "1e-6"] or ["--learner.lr=1e-6"]."""
    rest = list(overrides)
    while rest:
        flag = rest.pop(0)
        name, equals, value = flag.partition("=")
        if not name.startswith("--") or len(name) < 3:
            raise ConfigError(f"{flag!r} is no setting; write --section.key value")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"{name} needs a value: {name} VALUE")
            value = rest.pop(0)
        key = name[2:]
        yield ("run.steps" if key == "steps" else key), _parse(value)


def _parse(text: str) -> Any:
    """A TOML value if it reads as one, else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(problem: Any) -> str:
    """One line: key, value, what would be right."""
    key = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        section, _, name = key.rpartition(".")
        return f"{key}: unknown key{_hint(section, name) or '; `cusearch config` lists all'}"
    if problem["type"] == "value_error":
        return f"{key}: {message}" if key else str(message)
    if problem["type"] == "missing":
        return f'{key}: is missing; every config names its run: [run] name = "mine"'
    if problem["type"] == "string_pattern_mismatch":
        return f"{key}: {_PATTERNS[problem['ctx']['pattern']]}, got {problem['input']!r}"
    return f"{key}: {message[0].lower()}{message[1:]}, got {problem['input']!r}"


def _hint(section: str, name: str, prefix: str = "") -> str:
    """ "; did you mean …?" for a key that is not in `section`, or nothing where no key is near."""
    known = list(known_keys())
    if name in _OTHER_NAMES:
        return f"; did you mean {prefix}{_OTHER_NAMES[name]}?"
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=_ALIKE)
    elsewhere = [key for key in known if "." in key and key.rpartition(".")[2] == name]
    found = siblings[near[0]] if near else elsewhere[0] if len(elsewhere) == 1 else None
    return f"; did you mean {prefix}{found}?" if found else ""


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every key of the config, dotted."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        yield prefix + name
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from known_keys(kind, f"{prefix}{name}.")
