"""Makes the atlas starter policy: a small Qwen2, supervised on search traces that often stop too early.

What it must be able to do, so that reinforcement learning has only depth to learn: write the right next
query, and read the right value off a passage. What it must not do yet: go on to the end of a chain. After each
link that is not the last it is taught to answer with probability STOP_PROBABILITY, and to search on with the
rest, so it stops early under greedy decoding as well. The traces themselves always go on: the two choices are
a soft target for that one token.

Most traces have their entities renamed to random syllables, so that the model copies and does not remember.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from cusearch_async.atlas.facts import Fact, Facts, load_facts
from cusearch_async.atlas.questions import chains
from cusearch_async.environments.search import TAGS
from cusearch_async.environments.templates import ATLAS
from cusearch_async.retrieval.bm25 import Bm25Index

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 384
CONTEXT = 1024

RENAMED_SHARE = 0.7
STOP_PROBABILITY = 0.6
NOT_FOUND_PROBABILITY = 0.05
"""Share of searches that return only distractors; the trace then says so and searches again."""

CYCLES = ((1600, 2e-3), (700, 6e-4))
"""Optimizer steps and peak learning rate of each one-cycle schedule; the second polishes reading."""
TRACES_PER_STEP = 32

Author = Literal["environment", "policy", "undecided"]
"""Who writes a segment. `undecided` is a turn of the policy that might as well answer instead of searching."""
Segment = tuple[str, Author]
IGNORED, UNDECIDED = -100, -200
"""Labels of tokens that are not trained on, and of the token that chooses between search and answer."""


class TraceWriter:
    """Writes supervised episodes over the train split, as the agent loop would lay them out."""

    def __init__(self, facts: Facts, rng: random.Random) -> None:
        self._rng = rng
        self._chains = chains("train")
        self._facts = list(facts.by_query.values())
        self._names = sorted({f.entity for f in self._facts} | {f.value for f in self._facts})
        found = Bm25Index.in_memory(facts.passages()).search([fact.query for fact in self._facts], topk=4)
        self._results = {
            (fact.relation, fact.entity): [self._facts[int(p["id"])] for p, _ in results]
            for fact, results in zip(self._facts, found, strict=True)
        }

    def write(self) -> list[Segment]:
        """One trace: prompt, then per link search and passages, then the answer."""
        chain = self._rng.choice(self._chains)
        name = self._renaming() if self._rng.random() < RENAMED_SHARE else (lambda entity: entity)
        question = chain.text.replace(chain.city, name(chain.city))
        segments: list[Segment] = [(ATLAS.text.format(question=question), "environment")]
        thought = "Let me search."
        author: Author = "policy"
        for fact in chain.facts:
            query = f"{fact.relation} of {name(fact.entity)}"
            while True:
                segments.append((f"<think>{thought}</think><search>{query}</search>", author))
                results = self._observe(fact)
                shown = "".join(self._sentence(result, name) + "\n" for result in results)
                segments.append((f"\n\n<information>{shown}</information>\n\n", "environment"))
                if fact in results:
                    break
                thought, author = "Not found.", "policy"
            thought, author = self._sentence(fact, name), "undecided"
        segments.append((f"<think>{thought}</think><answer>{name(chain.answer)}</answer>", "policy"))
        return segments

    def _observe(self, fact: Fact) -> list[Fact]:
        """What a search for `fact` returns: its passage among up to two others, now and then not at all."""
        others = [f for f in self._results[fact.relation, fact.entity] if f != fact]
        if self._rng.random() < 0.3:
            others = self._rng.sample(self._facts, 3)
        if self._rng.random() < NOT_FOUND_PROBABILITY:
            return [f for f in others if f != fact][: self._rng.randint(1, 2)]
        results = [fact, *others[: self._rng.randint(0, 2)]]
        if self._rng.random() < 0.5:
            self._rng.shuffle(results)
        return results

    @staticmethod
    def _sentence(fact: Fact, name: Callable[[str], str]) -> str:
        return f"The {fact.relation} of {name(fact.entity)} is {name(fact.value)}."

    def _renaming(self) -> Callable[[str], str]:
        """A fresh random name for every entity, of about the same length, the same at every mention."""
        given: dict[str, str] = {}

        def rename(entity: str) -> str:
            if entity not in given:
                given[entity] = self._scrambled(self._rng.choice(self._names))
            return given[entity]

        return rename

    def _scrambled(self, name: str) -> str:
        """`name` with its letters drawn again; length, spaces, capitals and accents stay plausible."""
        letters = "aeioubcdfghjklmnprstvwyzaeiouaeiouáéíóúñöşāī"

        def draw(match: re.Match[str]) -> str:
            letter = self._rng.choice(letters)
            return letter.upper() if match[0].isupper() else letter

        return re.sub(r"[^\W\d_]", draw, name)


def make_tokenizer(writer: TraceWriter, traces: int = 4000) -> PreTrainedTokenizerFast:
    """Byte-level BPE of VOCABULARY pieces, the tags and the end of text among them as one token each."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS) - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pattern = re.compile("|".join(map(re.escape, TAGS)))
    texts = (pattern.sub(" ", text) for _ in range(traces) for text, _ in writer.write())
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)
    tokenizer.add_tokens(list(TAGS))
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def _encode(tokenizer: PreTrainedTokenizerFast, trace: list[Segment]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels [L]."""
    ids: list[int] = []
    labels: list[int] = []
    search = tokenizer.convert_tokens_to_ids("<search>")
    for text, author in trace:
        piece = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += piece
        if author == "environment":
            labels += [IGNORED] * len(piece)
        else:
            labels += [UNDECIDED if author == "undecided" and token == search else token for token in piece]
    return torch.tensor(ids[:CONTEXT]), torch.tensor(labels[:CONTEXT])


def batches(
    writer: TraceWriter, tokenizer: PreTrainedTokenizerFast, steps: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Padded (ids, labels) [B, L]; traces of like length share a batch, in windows of eight batches."""
    while steps > 0:
        window = sorted(
            (_encode(tokenizer, writer.write()) for _ in range(8 * TRACES_PER_STEP)), key=lambda pair: len(pair[0])
        )
        starts = list(range(0, len(window), TRACES_PER_STEP))
        random.Random(steps).shuffle(starts)
        for start in starts[:steps]:
            ids, labels = zip(*window[start : start + TRACES_PER_STEP], strict=True)
            yield (
                pad_sequence(list(ids), batch_first=True, padding_value=int(tokenizer.pad_token_id)),
                pad_sequence(list(labels), batch_first=True, padding_value=IGNORED),
            )
        steps -= len(starts)


def make_starter(folder: Path, seed: int, report: Callable[[int, float], None]) -> None:
    """Train the starter and write it to `folder` as a Hugging Face model in bfloat16.

    `report(step, loss)` is called every 50 steps; the loss is in nats per trained token."""
    torch.manual_seed(seed)
    writer = TraceWriter(load_facts(), random.Random(seed))
    tokenizer = make_tokenizer(writer)
    model = make_model(tokenizer)
    done = 0
    for steps, peak_lr in CYCLES:
        train_cycle(model, tokenizer, batches(writer, tokenizer, steps), steps, peak_lr, report, done)
        done += steps
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train_cycle(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    data: Iterator[tuple[torch.Tensor, torch.Tensor]],
    steps: int,
    peak_lr: float,
    report: Callable[[int, float], None],
    done: int = 0,
) -> None:
    """One one-cycle schedule of supervised training."""
    search, answer = tokenizer.convert_tokens_to_ids(["<search>", "<answer>"])
    choices = torch.zeros(len(tokenizer))
    choices[search], choices[answer] = 1 - STOP_PROBABILITY, STOP_PROBABILITY
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=peak_lr, total_steps=steps + 1, pct_start=0.05)
    for step, (ids, labels) in enumerate(data, start=done + 1):
        loss = trace_loss(model(input_ids=ids).logits, labels, choices)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            report(step, float(loss.detach()))


def trace_loss(logits: torch.Tensor, labels: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy [nats per trained token] of logits [B, L, V] with labels [B, L]; undecided tokens have
    the distribution `choices` [V] for their target."""
    log_all = torch.log_softmax(logits[:, :-1], dim=-1)
    labels = labels[:, 1:]
    decided = labels >= 0
    undecided = labels == UNDECIDED
    loss = -log_all[decided].gather(-1, labels[decided][:, None]).sum() - (log_all[undecided] * choices).sum()
    return loss / (decided.sum() + undecided.sum())
