"""A cross-encoder over what was found."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    MPNetConfig,
    MPNetForSequenceClassification,
    PreTrainedTokenizerFast,
)

from cusearch_async.config import RerankConfig
from cusearch_async.errors import ConfigError, SearchFailed
from cusearch_async.retrieval.rerank import Reranker
from tests.retrieval.encoders import SMALL, WORDS, save_model, save_tokenizer, sentences

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def rerankers(tmp_path_factory):
    """Folders of untrained cross-encoders."""
    folder = tmp_path_factory.mktemp("rerankers")
    bert, mpnet = BertForSequenceClassification, MPNetForSequenceClassification
    return {
        "bert": save_model(folder / "bert", bert, BertConfig(**SMALL, num_labels=1)),
        "two": save_model(folder / "two", bert, BertConfig(**SMALL, num_labels=2)),
        "three": save_model(folder / "three", bert, BertConfig(**SMALL, num_labels=3)),
        "mpnet": save_model(folder / "mpnet", mpnet, MPNetConfig(**SMALL, num_labels=1)),
        "headless": save_model(folder / "headless", BertModel, BertConfig(**SMALL)),
    }


@pytest.fixture(scope="module")
def make(rerankers):
    def reranker(name, max_tokens=48):
        return Reranker(RerankConfig(model=rerankers[name], max_tokens=max_tokens), "cpu")

    return reranker


def documents(count, seed=0):
    """As a search has found them, with its scores."""
    texts = sentences(count, seed)
    return [
        ({"id": f"{seed}-{row}", "contents": f'"title"\n{text}'}, 1.0 / (row + 1)) for row, text in enumerate(texts)
    ]


def plain_score(folder, model_class, query, contents, max_tokens=48):
    """One pair, scored by hand."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    title, text = contents.split("\n", 1)
    batch = tokenizer(query, f"(Title: {title}) {text}", truncation=True, max_length=max_tokens, return_tensors="pt")
    if model_class is MPNetForSequenceClassification:
        del batch["token_type_ids"]
    with torch.no_grad():
        logits = model_class.from_pretrained(folder).eval()(**batch).logits[0].tolist()
    return logits[0] if len(logits) == 1 else logits[1] - logits[0]


@pytest.mark.parametrize(
    ("name", "model_class"),
    [
        ("bert", BertForSequenceClassification),
        ("two", BertForSequenceClassification),
        ("mpnet", MPNetForSequenceClassification),
    ],
)
def test_documents_are_ordered_by_the_score_of_their_pair(make, rerankers, name, model_class):
    found = documents(7)
    (result,) = make(name).rerank(["peru"], [found], 4)
    expected = {p["id"]: plain_score(rerankers[name], model_class, "peru", p["contents"]) for p, _ in found}
    assert [passage["id"] for passage, _ in result] == sorted(expected, key=expected.__getitem__, reverse=True)[:4]
    assert [score for _, score in result] == pytest.approx([expected[p["id"]] for p, _ in result], abs=1e-4)
    assert all(isinstance(score, float) for _, score in result)


@pytest.mark.parametrize(("query_words", "words"), [(2, 60), (60, 2), (30, 90), (90, 30)])
def test_of_a_pair_that_is_too_long_the_longer_one_is_cut(make, rerankers, query_words, words):
    """As the tokenizer itself does it; of two long ones and an odd number of places it may favour the other."""
    query, contents = "peru " * query_words, '"title"\n' + "lima " * words
    ((_, score),) = make("bert", max_tokens=47).rerank([query], [[({"id": "1", "contents": contents}, 0.0)]], 1)[0]
    by_hand = plain_score(rerankers["bert"], BertForSequenceClassification, query, contents, max_tokens=47)
    assert score == pytest.approx(by_hand, abs=1e-4)


def test_each_query_has_its_own_documents_only(make):
    """Search-R1's reranker gave each query the documents of all."""
    queries = ["peru", "łódź", "nothing", "capital of"]
    found = [documents(5, seed=1), documents(3, seed=2), [], documents(1, seed=3)]
    reranker = make("bert")
    together = reranker.rerank(queries, found, 10)
    assert [{p["id"] for p, _ in result} for result in together] == [{p["id"] for p, _ in its} for its in found]
    alone = [reranker.rerank([query], [its], 10)[0] for query, its in zip(queries, found, strict=True)]
    for one, other in zip(together, alone, strict=True):
        assert [p["id"] for p, _ in one] == [p["id"] for p, _ in other]
        assert [score for _, score in one] == pytest.approx([score for _, score in other], abs=1e-4)


def test_more_pairs_than_a_batch_keep_their_places(make):
    queries = sentences(5, seed=4)
    found = [documents(20, seed=seed) for seed in range(5)]
    reranker = make("bert")
    together = reranker.rerank(queries, found, 20)
    for place in (0, 4):
        (alone,) = reranker.rerank([queries[place]], [found[place]], 20)
        scores = {passage["id"]: score for passage, score in alone}
        assert {p["id"]: score for p, score in together[place]} == pytest.approx(scores, abs=1e-4)


def test_equal_documents_keep_the_order_they_were_found_in(make):
    """And have one score, although a row's place in a batch changes the last bits of what is computed for it."""
    found = [({"id": str(row), "contents": '"a"\nsame'}, 0.0) for row in range(150)]
    for result in make("bert").rerank(["peru", "peru"], [found, found], 149):
        assert [passage["id"] for passage, _ in result] == [str(row) for row in range(149)]
        assert len({score for _, score in result}) == 1


def test_nothing_found_stays_nothing(make):
    assert make("bert").rerank([], [], 3) == []
    assert make("bert").rerank(["a", "b"], [[], []], 3) == [[], []]


def test_any_text_can_be_scored(make):
    """Two long ones among them, of which a tokenizer that is left alone makes gigabytes."""
    contents = ['"a"\n' + "word " * 10_000, "", "no title", '"京都"\n🙂', '"half"\n\ud800']
    found = [({"id": str(row), "contents": text}, 0.0) for row, text in enumerate(contents)]
    for query in ("łódź 京都 🙂", "word " * 10_000, "\ud800", ""):
        (result,) = make("bert").rerank([query], [found], 10)
        assert len(result) == 5
        assert all(math.isfinite(score) for _, score in result)


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"retriever\.rerank\.model '.*nowhere' cannot be loaded on 'cpu'"):
        Reranker(RerankConfig(model=str(tmp_path / "nowhere")), "cpu")


def test_a_device_that_is_not_there_is_named(rerankers):
    with pytest.raises(ConfigError, match=r"retriever\.rerank\.model .* cannot be loaded on 'abacus'"):
        Reranker(RerankConfig(model=rerankers["bert"]), "abacus")


def test_an_encoder_without_a_head_is_no_cross_encoder(make):
    with pytest.raises(ConfigError, match=r"retriever\.rerank\.model .* not a cross-encoder.*classifier"):
        make("headless")


def test_a_classifier_of_three_labels_is_no_cross_encoder(make):
    with pytest.raises(ConfigError, match=r"retriever\.rerank\.model .* has 3 labels"):
        make("three")


def test_pairs_beyond_the_models_positions_are_refused_at_once(make):
    with pytest.raises(ConfigError, match=r"cannot score a pair of 400 tokens \(retriever\.rerank\.max_tokens\)"):
        make("bert", max_tokens=400)


def test_a_model_that_gives_nan_is_named_with_the_pair(tmp_path):
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SMALL, num_labels=1))
    model.bert.embeddings.word_embeddings.weight.data[WORDS["z"]] = float("nan")
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    reranker = Reranker(RerankConfig(model=str(tmp_path), max_tokens=48), "cpu")
    with pytest.raises(SearchFailed, match=r"gives nan for .'z'"):
        reranker.rerank(["z"], [documents(2)], 2)


def test_a_model_that_gives_nan_for_every_pair_is_refused_at_the_start(tmp_path):
    model = BertForSequenceClassification(BertConfig(**SMALL, num_labels=1))
    model.bert.embeddings.word_embeddings.weight.data[:] = float("nan")
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"retriever\.rerank\.model .* gives nan"):
        Reranker(RerankConfig(model=str(tmp_path), max_tokens=48), "cpu")
