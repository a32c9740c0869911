"""Encoders of three families."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, CLIPConfig, CLIPModel, MPNetModel, PreTrainedTokenizerFast, T5Model

from cusearch_async.config import DenseConfig
from cusearch_async.errors import ConfigError, SearchFailed
from cusearch_async.retrieval.dense import Encoder
from tests.retrieval.encoders import SMALL, WORDS, save_model, save_tokenizer, says_pooling, sentences

pytestmark = pytest.mark.system

TEXTS = ["a", "", "the capital of peru", "łódź 京都 🙂", "x " * 40, "half \ud800 character", "word " * 10_000]


def plain_vector(settings, text, prefix):
    """One text, encoded as a reader of the model's card would."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(settings.encoder)
    family = {"bert": BertModel, "mpnet": MPNetModel, "t5": T5Model}[settings.encoder.rpartition("/")[2]]
    model = family.from_pretrained(settings.encoder).eval()
    text = text.replace("\ud800", "?")
    token_ids = torch.tensor([tokenizer(prefix + text)["input_ids"]])
    token_ids = torch.cat([token_ids[:, :63], token_ids[:, -1:]], dim=1) if token_ids.shape[1] > 64 else token_ids
    with torch.no_grad():
        states = (model.encoder if family is T5Model else model)(input_ids=token_ids).last_hidden_state[0]
    vector = {"cls": states[0], "last": states[-1]}.get(settings.pooling, states.mean(0))
    return (vector / vector.norm() if settings.normalize else vector).numpy()


@pytest.mark.parametrize("family", ["bert", "mpnet", "t5"])
@pytest.mark.parametrize(("pooling", "normalize"), [("mean", True), ("cls", True), ("last", True), (None, False)])
def test_batching_padding_and_order_change_nothing(settings, family, pooling, normalize):
    wanted = settings(family, pooling=pooling, normalize=normalize, batch=3)
    vectors = Encoder(wanted).encode(TEXTS, "passage")
    expected = np.stack([plain_vector(wanted, text, "passage: ") for text in TEXTS])
    assert vectors.dtype == np.float32
    assert np.abs(vectors - expected).max() <= 1e-5 * max(1.0, np.abs(expected).max())


def test_query_and_passage_have_their_own_prefix_and_length(settings):
    encoder = Encoder(settings(max_query_tokens=8, query_prefix="q ", passage_prefix=""))
    plain = Encoder(settings(max_query_tokens=8, query_prefix="", passage_prefix="q "))
    assert np.allclose(encoder.encode(["a b"], "query"), plain.encode(["a b"], "passage"), atol=1e-6)
    assert not np.allclose(encoder.encode(["a b"], "query"), encoder.encode(["a b"], "passage"), atol=0.01)
    assert np.allclose(*plain.encode(["a b c d e f", "a b c d e f g"], "query"), atol=1e-6), "six words are its most"
    assert not np.allclose(*plain.encode(["a b c d e f", "a b c d e f g"], "passage"), atol=0.01)


def test_an_encoder_has_the_pooling_and_prefixes_of_its_folder(encoders, settings, tmp_path):
    shutil.copytree(encoders["bert"], tmp_path / "model")
    says_pooling(tmp_path / "model", "cls")
    (tmp_path / "model" / "config_sentence_transformers.json").write_text('{"prompts": {"query": "find a b: "}}')
    found = Encoder(DenseConfig(encoder=str(tmp_path / "model")))
    asked = Encoder(settings(pooling="cls", query_prefix="find a b: ", passage_prefix=""))
    for kind in ("query", "passage"):
        assert np.allclose(found.encode(["x y z"], kind), asked.encode(["x y z"], kind), atol=1e-6)


def test_normalised_vectors_have_length_one_and_others_their_own(settings):
    texts = sentences(5)
    lengths = np.linalg.norm(Encoder(settings()).encode(texts, "query"), axis=1)
    assert lengths == pytest.approx(np.ones(5), abs=1e-5)
    lengths = np.linalg.norm(Encoder(settings(normalize=False)).encode(texts, "query"), axis=1)
    assert not np.allclose(lengths, 1, atol=0.1)


def test_no_texts_have_no_vectors(settings):
    assert Encoder(settings()).encode([], "query").shape == (0, 32)


def test_an_encoder_that_is_not_there_is_named(settings, tmp_path):
    with pytest.raises(ConfigError, match=r"retriever\.dense\.encoder '.*nowhere' cannot be loaded on 'cpu'"):
        Encoder(DenseConfig(encoder=str(tmp_path / "nowhere")))


def test_a_device_that_is_not_there_is_named(settings):
    with pytest.raises(ConfigError, match=r"retriever\.dense\.device = 'cuda:997', but CUDA finds \d+ GPUs"):
        Encoder(settings(device="cuda:997"))


def test_a_model_that_is_no_encoder_of_texts_is_refused(tmp_path):
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = CLIPConfig(text_config={**small, "vocab_size": len(WORDS)}, vision_config={**small, "image_size": 32})
    folder = save_model(tmp_path / "clip", CLIPModel, config)
    with pytest.raises(ConfigError, match=r"retriever\.dense\.encoder .* cannot encode"):
        Encoder(DenseConfig(encoder=folder))


def test_a_text_beyond_the_encoders_positions_is_refused_at_once(settings):
    with pytest.raises(ConfigError, match=r"cannot encode a text of 400 tokens .*max_passage_tokens"):
        Encoder(settings(max_passage_tokens=400))


def test_an_encoder_without_its_tokenizer_or_its_weights_is_refused(encoders, tmp_path):
    for name in ("tokenizer", "weights"):
        shutil.copytree(encoders["bert"], tmp_path / name)
    (tmp_path / "tokenizer" / "tokenizer.json").unlink()
    (tmp_path / "tokenizer" / "tokenizer_config.json").unlink()
    weights = tmp_path / "weights" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for name, named in (("tokenizer", "no tokenizer files"), ("weights", "cannot be loaded")):
        with pytest.raises(ConfigError, match=rf"retriever\.dense\.encoder .*{named}"):
            Encoder(DenseConfig(encoder=str(tmp_path / name)))


def test_an_encoder_with_a_layer_missing_is_refused_rather_than_made_up(encoders, tmp_path):
    shutil.copytree(encoders["bert"], tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ConfigError, match=r"lacks weights \(encoder\.layer\.2"):
        Encoder(DenseConfig(encoder=str(tmp_path / "model")))


def save_with_nan(folder, rows):
    torch.manual_seed(0)
    model = BertModel(BertConfig(**SMALL))
    model.embeddings.word_embeddings.weight.data[rows] = float("nan")
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return DenseConfig(encoder=str(folder))


def test_an_encoder_that_gives_nan_is_named_with_the_text(tmp_path):
    """For a query it is the search that fails; for a passage there can be no index."""
    encoder = Encoder(save_with_nan(tmp_path, WORDS["z"]))
    with pytest.raises(SearchFailed, match="gives NaN or infinity for 'b z'"):
        encoder.encode(["a", "b z", "c"], "query")
    with pytest.raises(ConfigError, match="gives NaN or infinity for 'b z'"):
        encoder.encode(["a", "b z", "c"], "passage")


def test_an_encoder_that_gives_nan_for_every_text_is_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"retriever\.dense\.encoder .* gives NaN or infinity"):
        Encoder(save_with_nan(tmp_path, slice(None)))
