"""Untrained encoders that are small and different, and texts for them."""

from __future__ import annotations

import json

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789:.ł京"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
WORDS = {word: number for number, word in enumerate([*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS)])}
SMALL = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 300,
    "initializer_range": 0.5,  # vectors that differ
    "pad_token_id": 0,
}


def save_tokenizer(folder):
    """A WordPiece tokenizer of letters; it offers token types to every model."""
    tokenizer = Tokenizer(models.WordPiece(WORDS, unk_token="[UNK]", max_input_chars_per_word=30))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)


def save_model(folder, model_class, config, seed=0):
    torch.manual_seed(seed)
    model_class(config).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def says_pooling(folder, *modes, compact=False):
    """Write the pooling as sentence-transformers does: before version 5.4, or since (`compact`)."""
    names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    said = {f"pooling_mode_{name}": name.removesuffix("_token").removesuffix("_tokens") in modes for name in names}
    if compact:
        said = {"pooling_mode": modes[0] if len(modes) == 1 else list(modes)}
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    text = json.dumps({"word_embedding_dimension": 32, **said, "include_prompt": True})
    (folder / "1_Pooling" / "config.json").write_text(text)


def sentences(count, seed=0):
    rng = np.random.default_rng(seed)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    return [" ".join("".join(rng.choice(letters, 3)) for _ in range(rng.integers(2, 6))) for _ in range(count)]


def corpus(count, seed=0):
    return [{"id": str(row), "contents": text} for row, text in enumerate(sentences(count, seed))]
