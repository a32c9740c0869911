"""Dense retrieval: an encoder of texts, and a FAISS index of its vectors.

Source: Search-R1, `search/index_builder.py` and `search/retrieval_server.py`. Departures: texts of like length share a
batch; an index has a manifest; of encoder-decoders the encoder's states are pooled.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel

from cusearch_async.config import DenseConfig
from cusearch_async.errors import ConfigError, SearchFailed, first_line, packages_of
from cusearch_async.files import put_in_place, sync, writing
from cusearch_async.retrieval import manifest, pretrained
from cusearch_async.retrieval.backend import OnProgress, Passage, Scored
from cusearch_async.retrieval.encoder_folder import resolved
from cusearch_async.streams import Stream, stream
from cusearch_async.surrogates import without_surrogates

with packages_of("retrieval"):
    import faiss

log = logging.getLogger(__name__)

FORMAT = "dense-1"
CHUNK = 4096
"""Passages that are encoded between two records of the progress; an interruption costs no more."""

_INDEX = "index.faiss"
_VECTORS = "vectors.f32"
_PROGRESS = "progress.json"

_HNSW_LINKS = 64
_HNSW_BUILD_WIDTH = 200
_LEAST_PER_LIST = 39  # fewer training vectors per list, and FAISS warns
_SAMPLE_PER_LIST = 64
_PROBE = "The capital of Peru is Lima."
_SAME_ENCODER = 0.999  # cosine; float16 against float32 costs about 1e-5


class Encoder:
    """Texts to vectors. Float16 on a GPU, float32 on a CPU. Not for two threads at once."""

    def __init__(self, settings: DenseConfig) -> None:
        """Encodes a text of the greatest length, to fail here and not in the middle of a corpus.

        Raises: ConfigError naming the encoder and the problem."""

        def encoder_of(model: Any) -> Any:
            return model.get_encoder() if model.config.is_encoder_decoder else model

        setting, name = "retriever.dense.encoder", settings.encoder
        self._tokenizer, self._model, missing = pretrained.load(AutoModel, name, settings.device, setting, encoder_of)
        self._tokenizer.padding_side = "right"  # the first place is the cls token's, the last is counted from there
        missing = [key for key in missing if "pooler" not in key and not key.startswith("decoder.")]
        if missing:
            lacks = f"lacks weights ({', '.join(missing[:3])}); its vectors would be random"
            raise ConfigError(f"{setting} {name!r} {lacks}")
        self.settings = settings = resolved(settings)
        log.info(
            "encoder %s: pooling %s, before queries %r, before passages %r",
            *(settings.encoder, settings.pooling, settings.query_prefix, settings.passage_prefix),
        )
        self._inputs = set(inspect.signature(self._model.forward).parameters)
        longest = max(settings.max_query_tokens, settings.max_passage_tokens)
        try:
            self._embed(["a " * longest], longest)
            self.probe = self._embed([f"{settings.passage_prefix}{_PROBE}"], settings.max_passage_tokens)[0]
        except Exception as error:  # the model's own code runs here
            keys = "retriever.dense.max_query_tokens, max_passage_tokens"
            problem = f"cannot encode a text of {longest} tokens ({keys}): {first_line(error)}"
            raise ConfigError(f"{setting} {name!r} {problem}") from error
        if not np.isfinite(self.probe).all():
            raise ConfigError(self._not_finite(_PROBE))

    @property
    def dim(self) -> int:
        return len(self.probe)

    def encode(self, texts: Sequence[str], kind: Literal["query", "passage"]) -> NDArray[np.float32]:
        """[n, dim], in the order of `texts`. What is longer than the kind's max tokens is cut.

        Raises: ConfigError when the encoder gives NaN or infinity for a passage, SearchFailed for a query."""
        settings = self.settings
        of_query = settings.query_prefix, settings.max_query_tokens
        prefix, max_tokens = of_query if kind == "query" else (settings.passage_prefix, settings.max_passage_tokens)
        vectors = np.empty((len(texts), self.dim), dtype=np.float32)
        order = sorted(range(len(texts)), key=lambda row: len(texts[row]))  # like lengths together: little padding
        for first in range(0, len(texts), settings.batch):
            rows = order[first : first + settings.batch]
            vectors[rows] = self._embed([f"{prefix}{texts[row]}" for row in rows], max_tokens)
        is_finite = np.isfinite(vectors).all(axis=1)
        if not is_finite.all():
            problem = self._not_finite(texts[int(np.argmin(is_finite))])
            raise ConfigError(problem) if kind == "passage" else SearchFailed(problem, status=500)
        return vectors

    def _not_finite(self, text: str) -> str:
        return f"retriever.dense.encoder {self.settings.encoder!r} gives NaN or infinity for {text!r:.200}"

    def _embed(self, texts: Sequence[str], max_tokens: int) -> NDArray[np.float32]:
        """[n, dim] of one batch."""
        whole = [without_surrogates(text) for text in texts]
        batch = self._tokenizer(whole, truncation=True, max_length=max_tokens, padding=True, return_tensors="pt")
        batch = batch.to(self.settings.device)
        with torch.inference_mode():
            output = self._model(**{name: value for name, value in batch.items() if name in self._inputs})
            states = output.last_hidden_state.float()  # [n, tokens, dim]
            mask = batch["attention_mask"]  # [n, tokens], padded on the right
            if self.settings.pooling == "cls":
                vectors = states[:, 0]
            elif self.settings.pooling == "last":
                vectors = states[torch.arange(len(states), device=states.device), (mask.sum(1) - 1).clamp(min=0)]
            else:
                weights = mask.unsqueeze(-1).float()
                vectors = (states * weights).sum(1) / weights.sum(1).clamp(min=1)
            if self.settings.normalize:
                vectors = torch.nn.functional.normalize(vectors, dim=-1)
        return np.asarray(vectors.cpu().numpy(), dtype=np.float32)


class DenseIndex:
    """Passages by the inner product of their vectors with the query's.

    Equal queries get equal results, up to rounding, which depends on the other queries of a batch."""

    def __init__(self, passages: Sequence[Passage], index: Any, encoder: Encoder, probes: int) -> None:
        """`index` is FAISS's, its numbers the rows of `passages`."""
        self.passages, self._index, self._encoder = passages, index, encoder
        if isinstance(index, faiss.IndexIVF):
            index.nprobe = min(probes, index.nlist)
        elif isinstance(index, faiss.IndexHNSW):
            index.hnsw.efSearch = probes  # FAISS searches at least topk wide

    @classmethod
    def in_memory(cls, passages: Sequence[Passage], settings: DenseConfig) -> DenseIndex:
        """Raises: ConfigError when the encoder cannot be used."""
        encoder = Encoder(settings)
        vectors = encoder.encode([passage["contents"] for passage in passages], "passage")
        return cls(passages, _index_of(vectors, settings), encoder, settings.probes)

    @classmethod
    def load(cls, folder: Path, passages: Sequence[Passage], settings: DenseConfig, fingerprint: str) -> DenseIndex:
        """An index that `build` has made, memory-mapped: processes on one machine share it, first searches are slow.

        Not covered: vectors that have changed within a file of the right size.
        Raises: ConfigError when there is no index, it is of another corpus or encoder, or damaged."""
        settings = resolved(settings)
        path, missing = folder / _INDEX, "an unfinished index" if (folder / _PROGRESS).exists() else "no index"
        made = manifest.check(path, _dependencies(settings, fingerprint, len(passages)), missing)
        encoder = Encoder(settings)
        if not _is_same_encoder(made, encoder):
            before = f"was made with another encoder (dim {made.get('dim')})"
            now = f"the one that is now at {settings.encoder!r} (dim {encoder.dim})"
            raise ConfigError(f"retriever.index {folder} {before} than {now}; {manifest.REMEDY}")
        try:
            index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
        except (OSError, RuntimeError) as error:
            raise manifest.damaged(path, first_line(error)) from error
        if (index.ntotal, index.d) != (made["passages"], made.get("dim")):
            there = f"it holds {index.ntotal} vectors of {index.d} numbers"
            raise manifest.damaged(path, f"{there} instead of {made['passages']} of {made.get('dim')}")
        return cls(passages, index, encoder, settings.probes)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Scored]]:
        """The `topk` best passages of each query, best first; none for a blank query. ivf and hnsw may find fewer."""
        found: list[list[Scored]] = [[] for _ in queries]
        asked = [place for place, query in enumerate(queries) if query.strip()]
        if not asked:
            return found
        vectors = self._encoder.encode([queries[place] for place in asked], "query")
        scores, rows = self._index.search(vectors, min(topk, len(self.passages)))
        for place, its_scores, its_rows in zip(asked, scores.tolist(), rows.tolist(), strict=True):
            pairs = zip(its_rows, its_scores, strict=True)
            found[place] = [(self.passages[row], score) for row, score in pairs if row >= 0]
        return found


def build(
    passages: Sequence[Passage], folder: Path, settings: DenseConfig, fingerprint: str, on_progress: OnProgress
) -> None:
    """Make the index of a corpus in `folder`. What was encoded before an interruption is not encoded again.

    Needs 4 dim bytes per passage on disk and then in memory, hnsw half a kilobyte more. flat and ivf come out the same
    each time; hnsw, linked in many threads, does not. An index that was there before serves until this one is written.
    Not covered: two builds in one folder.
    Raises: ConfigError when the encoder cannot be used."""
    folder.mkdir(parents=True, exist_ok=True)
    encoder = Encoder(settings)
    probe = [round(value, 6) for value in encoder.probe.tolist()]
    dependencies = _dependencies(encoder.settings, fingerprint, len(passages)) | {"dim": encoder.dim, "probe": probe}
    vectors = _encode_in_chunks(passages, folder, encoder, dependencies, on_progress)
    log.info("making the %s index of %d vectors", settings.kind, len(passages))
    index = folder / _INDEX
    with writing(index) as unfinished:
        faiss.write_index(_index_of(vectors, settings), str(unfinished))
    manifest.break_seal(index)
    put_in_place(index)
    manifest.seal(index, dependencies)
    (folder / _PROGRESS).unlink()
    (folder / _VECTORS).unlink()


def _dependencies(settings: DenseConfig, fingerprint: str, passages: int) -> dict[str, Any]:
    """What an index depends on; `settings` are resolved. The query's prefix and length may change freely."""
    names = ("encoder", "pooling", "passage_prefix", "max_passage_tokens", "normalize", "kind")
    return {"format": FORMAT, "corpus": fingerprint, "passages": passages, **{n: getattr(settings, n) for n in names}}


def _is_same_encoder(then: dict[str, Any], encoder: Encoder) -> bool:
    """The same text has the same direction: a folder's name does not tell when its weights have changed."""
    probe = np.array(then.get("probe", ()), dtype=np.float64)
    if probe.shape != encoder.probe.shape:
        return False
    lengths = float(np.linalg.norm(probe) * np.linalg.norm(encoder.probe))
    return float(probe @ encoder.probe) >= _SAME_ENCODER * lengths


def _encode_in_chunks(
    passages: Sequence[Passage], folder: Path, encoder: Encoder, dependencies: dict[str, Any], on_progress: OnProgress
) -> NDArray[np.float32]:
    """[n, dim], on disk. After each chunk the vectors are safe there, and then the note of how many they are."""
    row_bytes = 4 * encoder.dim
    done = _rows_done(folder, encoder, dependencies)
    if done:
        log.info("continuing in %s after %d of %d passages", folder, done, len(passages))
        on_progress(done, len(passages))
    else:
        (folder / _PROGRESS).unlink(missing_ok=True)  # it would speak for the vectors that replace its own
        sync(folder)
    with (folder / _VECTORS).open("r+b" if done else "wb") as file:
        file.truncate(done * row_bytes)  # what an interruption left half written
        file.seek(done * row_bytes)
        for first in range(done, len(passages), CHUNK):
            chunk = passages[first : first + CHUNK]
            file.write(encoder.encode([passage["contents"] for passage in chunk], "passage").tobytes())
            file.flush()
            os.fsync(file.fileno())
            done = first + len(chunk)
            manifest.write_json(folder / _PROGRESS, {**dependencies, "rows": done})
            on_progress(done, len(passages))
    return np.memmap(folder / _VECTORS, dtype=np.float32, mode="r", shape=(len(passages), encoder.dim))


def _rows_done(folder: Path, encoder: Encoder, dependencies: dict[str, Any]) -> int:
    """How many vectors of this corpus and encoder the folder holds; 0, and a warning, when they are others."""
    progress = folder / _PROGRESS
    if not progress.exists():
        return 0
    try:
        then = json.loads(progress.read_text(encoding="utf-8"))
        rows = int(then["rows"])
        is_whole = (folder / _VECTORS).stat().st_size >= rows * 4 * encoder.dim
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read (%s); starting again", progress, error)
        return 0
    problem = (
        manifest.differences(then, {key: value for key, value in dependencies.items() if key != "probe"})
        or (not _is_same_encoder(then, encoder) and "an encoder with other weights")
        or (not is_whole and f"fewer than the {rows} vectors that it should")
    )
    if problem:
        log.warning("%s holds an unfinished build of another index (%s); starting again", folder, problem)
    return 0 if problem else rows


def _index_of(vectors: NDArray[np.float32], settings: DenseConfig) -> Any:
    """A FAISS index whose numbers are the rows of `vectors`."""
    count, dim = vectors.shape
    index: Any
    if settings.kind == "hnsw":
        index = faiss.IndexHNSWFlat(dim, _HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = _HNSW_BUILD_WIDTH
    elif settings.kind == "ivf":
        lists = max(1, min(round(4 * math.sqrt(count)), count // _LEAST_PER_LIST))
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists, faiss.METRIC_INNER_PRODUCT)
        index.cp.spherical = True  # as FAISS's index_factory has it for inner products
        index.cp.min_points_per_centroid = 1  # already seen to, but for a corpus that fills no list
        size = min(count, _SAMPLE_PER_LIST * lists)
        sample = np.sort(stream(Stream.CENTROIDS, 0).choice(count, size=size, replace=False))
        index.train(vectors[sample])
    else:
        index = faiss.IndexFlatIP(dim)
    index.add(np.ascontiguousarray(vectors))  # all at once: FAISS would double its room, and hold both for a while
    return index
