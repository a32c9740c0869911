"""What a policy of the atlas world can do, link by link: write the right query, read the right value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cusearch_async.atlas.facts import load_facts
from cusearch_async.atlas.questions import Chain, test_chains
from cusearch_async.config import Config
from cusearch_async.environments.search import render_documents
from cusearch_async.environments.templates import ATLAS
from cusearch_async.models import load_tokenizer
from cusearch_async.retrieval.bm25 import Bm25Index
from cusearch_async.training.model import load_causal_lm
from cusearch_async.types import Question


class LocalSearch:
    """The atlas index in this process, without HTTP; for checks."""

    def __init__(self, topk: int) -> None:
        self._index = Bm25Index.in_memory(load_facts().passages())
        self._topk = topk

    async def search(self, query: str, draw: int, question: Question, ticket: int) -> list[str]:
        return self.find(query)

    def find(self, query: str) -> list[str]:
        return [passage["contents"] for passage, _ in self._index.search([query], self._topk)[0]]


@dataclass(frozen=True, slots=True)
class Skills:
    links: int
    right_queries: float
    right_readings: float


@dataclass(slots=True)
class _Script:
    """The tokens of a chain's right episode, and which stretches of them are queries and readings."""

    ids: list[int]
    queries: list[range]
    readings: list[range]


def skills(config: Config, per_length: int) -> Skills:
    """Shares of the links of test chains where the policy, told to go on and shown what the search returns,
    greedily writes exactly the right query, and exactly the sentence that answers it."""
    tokenizer = load_tokenizer(config.model.location)
    model = load_causal_lm(config.model.location, "float32").eval()
    search = LocalSearch(config.retriever.topk)
    template = config.environment[config.evaluated_in].own.document_template
    queries: list[bool] = []
    readings: list[bool] = []
    for chain in test_chains(per_length):
        script = _script(chain, tokenizer, search, template)
        ids = torch.tensor([script.ids])
        with torch.no_grad():
            greedy = model(ids).logits[0, :-1].argmax(-1) == ids[0, 1:]  # [L-1] token i+1 is what greedy writes
        queries += [bool(greedy[span.start - 1 : span.stop - 1].all()) for span in script.queries]
        readings += [bool(greedy[span.start - 1 : span.stop - 1].all()) for span in script.readings]
    return Skills(len(queries), sum(queries) / len(queries), sum(readings) / len(readings))


def _script(chain: Chain, tokenizer: Any, search: LocalSearch, template: str) -> _Script:
    script = _Script([], [], [])

    def lay(text: str) -> range:
        start = len(script.ids)
        script.ids += tokenizer(text, add_special_tokens=False)["input_ids"]
        return range(start, len(script.ids))

    lay(ATLAS.text.format(question=chain.text))
    lay("<think>Let me search.</think>")
    for fact in chain.facts:
        lay("<search>")
        script.queries.append(lay(f"{fact.query}</search>"))
        shown = render_documents(search.find(fact.query), template)
        lay(f"\n\n<information>{shown}</information>\n\n")
        lay("<think>")
        script.readings.append(lay(f"{fact.sentence}</think>"))
    return script
