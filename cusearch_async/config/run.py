"""The run, its model, its data and its evaluation."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from cusearch_async.config.section import NAME, Dtype, Section, Sources

STARTER = Path(__file__).parents[1] / "atlas" / "starter"
"""The shipped policy of the atlas world."""


class RunConfig(Section):
    name: str = Field(pattern=NAME)
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
    source: Sources = Field(("atlas",), min_length=1)
    """One or several of: `atlas`, a .parquet file in the schema of Search-R1 or VERL, a .jsonl file of {"question",
    "golden_answers"}, or hf:OWNER/NAME/FILE for such a file on the Hugging Face Hub. All their questions together are
    one dataset; every epoch visits each of them once."""


class EvalConfig(Section):
    suite: tuple[str, ...] = ()
    """Benchmarks (nq, triviaqa, popqa, hotpotqa, 2wikimultihopqa, musique, bamboogle) or question files; empty for
    atlas's held-out cities."""
    folder: str = "hf:RUC-NLPIR/FlashRAG_datasets"
    """Where the benchmarks are, as NAME/SPLIT.jsonl: a local folder, or hf:OWNER/NAME."""
    limit: int | None = Field(None, ge=1)
    """Questions per benchmark, the same ones for a run.seed; None for all."""
    environment: str = ""
    """The label of the environment that held-out questions are played in; empty for the first."""
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
