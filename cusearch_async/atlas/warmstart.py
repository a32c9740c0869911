"""Makes the starter policies of the atlas worlds: a small Qwen2, supervised on the traces of `atlas.traces`. The one of
the hard world is the plain one, trained further."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from cusearch_async.atlas.facts import load_facts
from cusearch_async.atlas.traces import HARD, PLAIN, Passage, Style, TraceWriter
from cusearch_async.environments.search import TAGS
from cusearch_async.learner.model import load_causal_lm
from cusearch_async.models import load_tokenizer

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 384
CONTEXT = 1024

CYCLES = {PLAIN: ((1600, 2e-3), (700, 6e-4)), HARD: ((500, 8e-4),)}
"""Optimizer steps and peak learning rate of each one-cycle schedule; the second of PLAIN polishes reading."""
TRACES_PER_STEP = 32

IGNORED, CHOICE = -100, -200
"""Labels of tokens that are not trained on, and, less k, of one that chooses with the k-th of the style's `stops`."""


def make_tokenizer(writer: TraceWriter, traces: int = 4000) -> PreTrainedTokenizerFast:
    """Byte-level BPE of VOCABULARY pieces, the tags and the end of text among them as one token each."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS) - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    pattern = re.compile("|".join(map(re.escape, TAGS)))
    texts = (pattern.sub(" ", passage.text) for _ in range(traces) for passage in writer.write())
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)
    tokenizer.add_tokens(list(TAGS))
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    tokens = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes |= {"num_key_value_heads": 4, "max_position_embeddings": CONTEXT, "vocab_size": len(tokenizer)}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **tokens, tie_word_embeddings=False))


def _encode(
    tokenizer: PreTrainedTokenizerFast, trace: Sequence[Passage], stops: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    ids: list[int] = []
    labels: list[int] = []
    actions = tokenizer.convert_tokens_to_ids(["<search>", "<answer>"])
    for passage in trace:
        piece = tokenizer(passage.text, add_special_tokens=False)["input_ids"]
        ids += piece
        if passage.author == "environment":
            labels += [IGNORED] * len(piece)
        elif passage.stop is None:
            labels += piece
        else:
            choice = CHOICE - stops.index(passage.stop)
            labels += [choice if token in actions else token for token in piece]
    return torch.tensor(ids[:CONTEXT]), torch.tensor(labels[:CONTEXT])


def batches(
    writer: TraceWriter, tokenizer: PreTrainedTokenizerFast, steps: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Padded (ids, labels) [B, L]; traces of like length share a batch, in windows of eight batches."""
    while steps > 0:
        window = sorted(
            (_encode(tokenizer, writer.write(), writer.style.stops) for _ in range(8 * TRACES_PER_STEP)),
            key=lambda pair: len(pair[0]),
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


def make_starter(folder: Path, style: Style, seed: int, start: str, report: Callable[[int, float], None]) -> None:
    """Train the starter of a world and write it to `folder` as a Hugging Face model in bfloat16.

    PLAIN begins with random weights and a new tokenizer, HARD with the model `start`. `report(step, loss)` is called
    every 50 steps; the loss is in nats per trained token."""
    torch.manual_seed(seed)
    writer = TraceWriter(load_facts(), style, random.Random(seed))
    if style is PLAIN:
        tokenizer = make_tokenizer(writer)
        model = make_model(tokenizer)
    else:
        tokenizer, model = load_tokenizer(start), load_causal_lm(start, "float32")
    done = 0
    for steps, peak_lr in CYCLES[style]:
        train_cycle(model, tokenizer, style, batches(writer, tokenizer, steps), steps, peak_lr, report, done)
        done += steps
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train_cycle(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    style: Style,
    data: Iterator[tuple[torch.Tensor, torch.Tensor]],
    steps: int,
    peak_lr: float,
    report: Callable[[int, float], None],
    done: int = 0,
) -> None:
    search, answer = tokenizer.convert_tokens_to_ids(["<search>", "<answer>"])
    choices = torch.zeros(len(style.stops), len(tokenizer))
    choices[:, answer] = torch.tensor(style.stops)
    choices[:, search] = 1 - choices[:, answer]
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
    """Mean cross-entropy [nats per trained token] of logits [B, L, V] with labels [B, L]; a token that is a choice has
    its row of the distributions `choices` [k, V] for its target."""
    log_all = torch.log_softmax(logits[:, :-1], dim=-1)
    labels = labels[:, 1:]
    decided, undecided = labels >= 0, labels <= CHOICE
    targets = choices[CHOICE - labels[undecided]]
    loss = -log_all[decided].gather(-1, labels[decided][:, None]).sum() - (log_all[undecided] * targets).sum()
    return loss / (decided.sum() + undecided.sum())
