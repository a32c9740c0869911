"""A cross-encoder reads query and document together and reranks what a search has found.

Source: Search-R1, `search/rerank_server.py`. Departure: there each query is scored against the documents of all
queries of a request, here only against its own.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence

import torch
from transformers import AutoModelForSequenceClassification

from cusearch_async.config import RerankConfig
from cusearch_async.errors import ConfigError, SearchFailed, first_line
from cusearch_async.retrieval import pretrained
from cusearch_async.retrieval.backend import Passage, Scored
from cusearch_async.surrogates import without_surrogates

_BATCH = 64


class Reranker:
    """Float16 on a GPU, float32 on a CPU. Not for two threads at once."""

    def __init__(self, settings: RerankConfig, device: str) -> None:
        """Scores a pair of the greatest length, to fail here and not in the middle of a run.

        Raises: ConfigError naming the model and the problem."""
        self._settings, self._device = settings, device
        setting, auto = f"retriever.rerank.model {settings.model!r}", AutoModelForSequenceClassification
        self._tokenizer, self._model, missing = pretrained.load(auto, settings.model, device, "retriever.rerank.model")
        if missing:
            raise ConfigError(f"{setting} is not a cross-encoder: it lacks weights ({', '.join(missing[:3])})")
        if (labels := self._model.config.num_labels) not in (1, 2):
            wanted = "a cross-encoder has one, or two of which the last is relevance"
            raise ConfigError(f"{setting} has {labels} labels; {wanted}")
        self._inputs = set(inspect.signature(self._model.forward).parameters)
        try:
            self._score([("a", "a " * settings.max_tokens)])
        except Exception as error:  # the model's own code runs here
            long = f"{settings.max_tokens} tokens (retriever.rerank.max_tokens)"
            raise ConfigError(f"{setting} cannot score a pair of {long}: {first_line(error)}") from error

    def rerank(self, queries: Sequence[str], found: Sequence[Sequence[Scored]], topk: int) -> list[list[Scored]]:
        """Of each query's own documents the `topk` best, with the cross-encoder's score; equals keep their order.

        Equal pairs are scored once: a row's place in a batch changes the last bits of its score.
        Raises: SearchFailed when the model gives NaN or infinity."""
        asked = [[(query, _as_text(passage)) for passage, _ in its] for query, its in zip(queries, found, strict=True)]
        pairs = list(dict.fromkeys(pair for its in asked for pair in its))
        scores = dict(zip(pairs, self._score(pairs), strict=True))
        scored = [
            [(passage, scores[pair]) for pair, (passage, _) in zip(pairs_of, its, strict=True)]
            for pairs_of, its in zip(asked, found, strict=True)
        ]
        return [sorted(its, key=lambda one: -one[1])[:topk] for its in scored]

    def _score(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        order = sorted(range(len(pairs)), key=lambda row: sum(map(len, pairs[row])))  # like lengths: little padding
        scores = [math.nan] * len(pairs)
        for first in range(0, len(pairs), _BATCH):
            rows = order[first : first + _BATCH]
            for row, score in zip(rows, self._score_batch([pairs[row] for row in rows]), strict=True):
                scores[row] = score
        for pair, score in zip(pairs, scores, strict=True):
            if not math.isfinite(score):
                model = f"retriever.rerank.model {self._settings.model!r}"
                raise SearchFailed(f"{model} gives {score} for {pair!r:.200}", status=500)
        return scores

    def _score_batch(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        texts = (self._cut(part) for part in zip(*pairs, strict=True))
        options = {"truncation": True, "max_length": self._settings.max_tokens, "padding": True}
        batch = self._tokenizer(*texts, **options, return_tensors="pt").to(self._device)
        with torch.inference_mode():
            logits = self._model(**{name: value for name, value in batch.items() if name in self._inputs}).logits
        logits = logits.float()
        # Two labels are trained with a softmax over them: their difference is what orders documents.
        scores: list[float] = (logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits[:, 0]).tolist()
        return scores

    def _cut(self, texts: Sequence[str]) -> list[str]:
        """Each to as many tokens as a pair may have. Of a pair of long texts tokenizers return every combination of
        their overflows: gigabytes."""
        whole = [without_surrogates(text) for text in texts]
        options = {"truncation": True, "max_length": self._settings.max_tokens, "add_special_tokens": False}
        kept = self._tokenizer(whole, **options, return_offsets_mapping=True)["offset_mapping"]
        return [text[: places[-1][1]] if places else "" for text, places in zip(whole, kept, strict=True)]


def _as_text(passage: Passage) -> str:
    """Search-R1's form of a document."""
    title, _, text = passage["contents"].partition("\n")
    return f"(Title: {title}) {text}"
