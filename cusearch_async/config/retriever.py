"""The retriever and its backends."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from cusearch_async.config.section import (
    DEVICE,
    Folder,
    Free,
    Location,
    Section,
    Shared,
    asked_url,
    refuse_dates,
    service_url,
)

BACKENDS = ("bm25", "dense", "zerosearch", "serper", "serpapi")
_SIMULATOR_URL = service_url("http://127.0.0.1:6001/v1", "/chat/completions", "set CUSEARCH_SIMULATOR_KEY instead")
_WEB_URL = asked_url("https://google.serper.dev/search", "set SERPER_API_KEY or SERPAPI_API_KEY instead")


class Bm25Config(Section):
    """The `bm25` backend."""

    tokenizer: Shared[str] = "unicode"
    """How texts become words. unicode: words of two letters and more; without spaces (Chinese, Japanese, Thai, …),
    characters and pairs of them. Or your own function, as package.module:function. Of a query the first 256 count."""

    @field_validator("tokenizer")
    @classmethod
    def _known(cls, name: str) -> str:
        if name != "unicode" and ":" not in name:
            raise ValueError(f"must be 'unicode', or your own function as package.module:function, got {name!r}")
        return name


E5 = "intfloat/e5-base-v2"


class DenseConfig(Section):
    """The `dense` backend; the defaults are Search-R1's."""

    encoder: Shared[Location] = E5
    """A Hugging Face id or local folder for transformers' AutoModel."""
    query_prefix: Shared[str | None] = None
    """Text before each query; None: that in the encoder's folder (the prompt `query`), else `query: ` for the default
    encoder and nothing for others."""
    passage_prefix: Shared[str | None] = None
    """Text before each passage; None: that in the encoder's folder (the prompt `document`), else as for queries, with
    `passage: `."""
    pooling: Shared[Literal["mean", "cls", "last"] | None] = None
    """The vector of a text: the mean over its tokens (mean), or that of its first (cls) or last token (last); None: as
    in the encoder's folder, else the mean."""
    normalize: Shared[bool] = True
    """Scale vectors to length 1: the inner product is the cosine."""
    max_query_tokens: Shared[int] = Field(256, ge=1)
    """Longer queries are cut off."""
    max_passage_tokens: Shared[int] = Field(256, ge=1)
    """Longer passages are cut off."""
    batch: Free[int] = Field(128, ge=1)
    """Texts per encoder batch."""
    device: Free[str] = Field("cpu", pattern=DEVICE)
    """Device of encoder and reranker: `cpu`, `cuda`, `cuda:1`, …"""
    kind: Shared[Literal["flat", "hnsw", "ivf"]] = "flat"
    """Kind of the FAISS index."""
    probes: Shared[int] = Field(64, ge=1)
    """ivf: lists searched per query. hnsw: width of the search, at least topk."""


class RerankConfig(Section):
    """A cross-encoder that reranks the results of bm25 or dense."""

    model: Shared[Location | None] = None
    """A Hugging Face id or local folder (Search-R1: cross-encoder/ms-marco-MiniLM-L12-v2); None: no reranking."""
    candidates: Shared[int] = Field(10, ge=1)
    """Documents to rerank; the best topk are returned."""
    max_tokens: Shared[int] = Field(512, ge=1)
    """Maximum length of query and document together; longer pairs are cut off."""


class ZeroSearchConfig(Section):
    """The `zerosearch` backend: a language model simulates the search engine."""

    url: Free[Annotated[str, _SIMULATOR_URL]] = "http://127.0.0.1:6001/v1"
    """OpenAI-compatible server, its key in CUSEARCH_SIMULATOR_KEY."""
    model: Shared[str] = ""
    """Model name in the request; a server with one model ignores it."""
    mode: Shared[Literal["sft", "prompt"]] = "sft"
    """sft: the short prompt of ZeroSearch's fine-tuned simulators; prompt: one with an example, for any chat model."""
    p_start: Shared[float] = Field(0.0, ge=0, le=1)
    """Probability that a search returns noisy documents, at the first step …"""
    p_end: Shared[float] = Field(0.5, ge=0, le=1)
    """… and at the last step."""
    base: Shared[float] = Field(4.0, gt=1)
    """b of p(i) = p_s + (b^(i/m) - 1) / (b - 1) (p_e - p_s)."""
    steps: Shared[int | None] = Field(None, ge=1)
    """m; None: run.steps, which then cannot be raised later: another m is another engine."""
    temperature: Shared[float] = Field(0.8, ge=0)
    """Sampling temperature of the simulator."""
    max_tokens: Shared[int] = Field(600, ge=1)
    """Maximum length of its answers."""
    timeout_s: Free[float] = Field(25.0, gt=0)
    """Longest wait for an answer."""


class WebConfig(Section):
    """The `serper` and `serpapi` backends; the key comes from SERPER_API_KEY or SERPAPI_API_KEY."""

    url: Shared[Annotated[str, _WEB_URL] | None] = None
    """Search endpoint; None: the service's own."""
    per_second: Free[float] = Field(5.0, gt=0)
    """Maximum number of requests per second."""
    max_requests: Free[int | None] = Field(None, ge=1)
    """Maximum number of requests of a retriever process, cached answers not counted; None: no limit."""
    attempts: Free[int] = Field(3, ge=1)
    """Attempts at a request before the search fails."""
    timeout_s: Free[float] = Field(8.0, gt=0)
    """Longest wait for an answer to one attempt."""
    cache: Free[Folder | None] = None
    """Folder for cached answers; None (training should see fresh noise): no cache."""
    cache_ttl_s: Free[float] = Field(86400.0, gt=0)
    """Older cached answers are requested again, and removed."""

    @property
    def longest_s(self) -> float:
        """Of all attempts, without the pauses between them."""
        return self.attempts * self.timeout_s


EMBEDDED = ("atlas", "atlas-prose")
"""Corpora that come with the package."""


MAX_TOPK = 100
"""Documents per search."""


class RetrieverConfig(Section):
    url: Free[Annotated[str, service_url("http://127.0.0.1:8000", "/retrieve")]] = "http://127.0.0.1:8000"
    """Where the retriever answers `POST /retrieve`; `cusearch launch` starts one there if nothing listens."""
    backend: Shared[str] = "bm25"
    """Search engine: a local index (bm25, dense), a language model that simulates one (zerosearch), the web (serper,
    serpapi), or your own, as package.module:Name."""
    options: Shared[Annotated[dict[str, Any], AfterValidator(refuse_dates)]] = Field({})
    """Keyword arguments of your own backend."""
    corpus: Shared[Location] = "atlas"
    """bm25 and dense: `atlas`, `atlas-prose`, or a file of {"id", "contents"} lines, or a .tsv like DPR's."""
    index: Free[Folder | None] = None
    """bm25 and dense: a folder that `cusearch index` has written; None: an index in memory, built at each start."""
    topk: Shared[int] = Field(3, ge=1, le=MAX_TOPK)
    """Documents per search."""
    timeout_s: Free[float] = Field(30.0, gt=0)
    """Longest wait of a worker for an answer; then it retries."""
    max_connections: Free[int] = Field(256, ge=1)
    """Concurrent searches of one worker."""
    outage_s: Free[float] = Field(300.0, gt=0)
    """How long a worker waits for the retriever before it exits with RetrievalUnavailable."""
    deterministic: Free[bool] = False
    """Whether equal queries get equal documents, for a server whose /health does not report it (ours does). Then a
    worker sends equal concurrent searches once."""
    max_answer_mib: Free[int] = Field(16, ge=1)
    """Maximum size of an answer; a larger one fails the episode."""
    distractors: Shared[int] = Field(0, ge=0)
    """bm25 and dense: how many of the topk documents are replaced by random ones, never the first."""
    noise: Shared[float] = Field(0.0, ge=0, le=1)
    """bm25 and dense: probability that a search returns random documents only."""
    stochastic: Shared[bool] = True
    """Draw distractors and noise per search; false: per query, so that equal queries get equal documents."""
    latency_median_s: Free[float] = Field(0.0, ge=0)
    """bm25 and dense: simulated latency: half of all requests wait at least this long …"""
    latency_p99_s: Free[float] = Field(0.0, ge=0)
    """… and one in a hundred at least this long (log-normal); 0: none."""
    bm25: Bm25Config = Bm25Config()
    dense: DenseConfig = DenseConfig()
    rerank: RerankConfig = RerankConfig()
    zerosearch: ZeroSearchConfig = ZeroSearchConfig()
    web: WebConfig = WebConfig()

    @field_validator("backend")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in BACKENDS and ":" not in name:
            known = ", ".join(map(repr, BACKENDS))
            raise ValueError(f"must be {known}, or your own backend as package.module:Name, got {name!r}")
        return name

    @property
    def longest_latency_s(self) -> float:
        """Less than a worker waits: it would send the search again, and that would have the same latency."""
        return 0.9 * self.timeout_s

    @property
    def searches_web(self) -> bool:
        return self.backend in ("serper", "serpapi")

    @property
    def has_corpus(self) -> bool:
        """Whether its backend, one of ours, searches `corpus`."""
        return self.backend in ("bm25", "dense")

    @model_validator(mode="after")
    def _fits_together(self) -> RetrieverConfig:
        median_s, p99_s = self.latency_median_s, self.latency_p99_s
        if p99_s < median_s:
            raise ValueError(f"latency_p99_s ({p99_s}) must be >= latency_median_s ({median_s})")
        if median_s and self.backend in BACKENDS and not self.has_corpus:
            raise ValueError(f"latency_median_s needs backend 'bm25' or 'dense': {self.backend} has its own latency")
        if p99_s > self.longest_latency_s:
            most = f"0.9 x timeout_s ({self.longest_latency_s:g})"
            raise ValueError(f"latency_p99_s ({p99_s:g}) must be at most {most}, at which all are cut")
        if self.index is not None and self.corpus in EMBEDDED:
            raise ValueError(f"index must not be set for the corpus {self.corpus!r}, which is indexed in memory")
        simulator = "zerosearch.timeout_s", self.zerosearch.timeout_s
        web = "web.attempts x web.timeout_s", self.web.longest_s
        name, takes_s = {"zerosearch": simulator, "serper": web, "serpapi": web}.get(self.backend, ("", 0.0))
        if takes_s >= self.timeout_s:
            raise ValueError(
                f"timeout_s ({self.timeout_s:g}) must be more than {name} ({takes_s:g}): a worker would ask again "
                "while its first search still runs"
            )
        return self
