"""Encoders of three families, and FAISS indexes in memory and in folders."""

from __future__ import annotations

import json
import logging
import shutil

import faiss
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    MPNetConfig,
    MPNetModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5Model,
)

from cusearch_async.config import DenseConfig
from cusearch_async.errors import ConfigError
from cusearch_async.retrieval.dense import CHUNK, DenseIndex, Encoder, build

pytestmark = pytest.mark.system

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
TEXTS = ["a", "", "the capital of peru", "łódź 京都 🙂", "x " * 40, "half \ud800 character", "word " * 10_000]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Models as small as these lose more by waiting for threads than they gain."""
    threads = torch.get_num_threads(), faiss.omp_get_max_threads()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    yield
    torch.set_num_threads(threads[0])
    faiss.omp_set_num_threads(threads[1])


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


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """Folders of untrained encoders, by family."""
    folder = tmp_path_factory.mktemp("encoders")
    t5 = {key: SMALL[key] for key in ("vocab_size", "pad_token_id")}
    t5 |= {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "initializer_factor": 5.0}
    return {
        "bert": save_model(folder / "bert", BertModel, BertConfig(**SMALL)),
        "other": save_model(folder / "other", BertModel, BertConfig(**SMALL), seed=1),
        "mpnet": save_model(folder / "mpnet", MPNetModel, MPNetConfig(**SMALL)),
        "t5": save_model(folder / "t5", T5Model, T5Config(**t5)),
    }


@pytest.fixture(scope="module")
def settings(encoders):
    def make(family="bert", **values):
        return DenseConfig(encoder=encoders[family], **{"max_passage_tokens": 64, "max_query_tokens": 64, **values})

    return make


def sentences(count, seed=0):
    rng = np.random.default_rng(seed)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    return [" ".join("".join(rng.choice(letters, 3)) for _ in range(rng.integers(2, 6))) for _ in range(count)]


def corpus(count, seed=0):
    return [{"id": str(row), "contents": text} for row, text in enumerate(sentences(count, seed))]


@pytest.fixture(scope="module")
def passages():
    return corpus(400)


def ids(found):
    return [[passage["id"] for passage, _ in result] for result in found]


def quiet(done, total):
    pass


# The encoder.


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
    vector = states[0] if settings.pooling == "cls" else states.mean(0)
    return (vector / vector.norm() if settings.normalize else vector).numpy()


@pytest.mark.parametrize("family", ["bert", "mpnet", "t5"])
@pytest.mark.parametrize(("pooling", "normalize"), [("mean", True), ("cls", True), ("mean", False)])
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


def test_an_encoder_that_gives_nan_is_named_with_the_text(tmp_path):
    torch.manual_seed(0)
    model = BertModel(BertConfig(**SMALL))
    model.embeddings.word_embeddings.weight.data[WORDS["z"]] = float("nan")
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    encoder = Encoder(DenseConfig(encoder=str(tmp_path)))
    with pytest.raises(ConfigError, match="gives NaN or infinity for 'b z'"):
        encoder.encode(["a", "b z", "c"], "query")


# Search.


def test_flat_finds_the_greatest_inner_products(settings, passages):
    wanted = settings(normalize=False)
    encoder = Encoder(wanted)
    queries = sentences(30, seed=1)
    products = encoder.encode(queries, "query") @ encoder.encode([p["contents"] for p in passages], "passage").T
    best = np.argsort(-products, axis=1)[:, :5]
    found = DenseIndex.in_memory(passages, wanted).search(queries, 5)
    assert ids(found) == [[str(row) for row in rows] for rows in best]
    scores = np.array([[score for _, score in result] for result in found])
    assert np.allclose(scores, np.take_along_axis(products, best, axis=1), rtol=1e-4)
    assert isinstance(found[0][0][1], float)


@pytest.mark.parametrize(("kind", "probes", "least"), [("hnsw", 64, 0.95), ("ivf", 3, 0.5), ("ivf", 64, 1.0)])
def test_approximate_kinds_find_most_of_what_flat_finds(settings, passages, kind, probes, least):
    queries = sentences(40, seed=2)
    exact = ids(DenseIndex.in_memory(passages, settings()).search(queries, 5))
    found = ids(DenseIndex.in_memory(passages, settings(kind=kind, probes=probes)).search(queries, 5))
    recall = np.mean([len(set(a) & set(b)) / 5 for a, b in zip(exact, found, strict=True)])
    assert recall >= least


@pytest.mark.parametrize("kind", ["flat", "hnsw", "ivf"])
def test_equal_searches_are_answered_equally_and_blank_ones_with_nothing(settings, passages, kind):
    index = DenseIndex.in_memory(passages, settings(kind=kind))
    queries = ["peru", "", " \n", "łódź 京都 🙂", "\ud800", "word " * 10_000]
    first, second = index.search(queries, 3), index.search(queries, 3)
    assert first == second
    assert [len(result) for result in first] == [3, 0, 0, 3, 3, 3]
    assert index.search([], 3) == []
    assert index.search([""], 3) == [[]]


@pytest.mark.parametrize("kind", ["flat", "hnsw", "ivf"])
@pytest.mark.parametrize("count", [1, 7])
def test_more_than_the_corpus_gives_all_of_it(settings, kind, count):
    index = DenseIndex.in_memory(corpus(count), settings(kind=kind))
    assert sorted(ids(index.search(["peru"], 50))[0]) == [str(row) for row in range(count)]


def test_lists_that_hold_too_few_give_fewer_and_nothing_else(settings, passages):
    found = DenseIndex.in_memory(passages, settings(kind="ivf", probes=1)).search(["peru"], 400)[0]
    assert 0 < len(found) < 400
    assert len({passage["id"] for passage, _ in found}) == len(found)


def test_no_passages_make_no_index(settings, tmp_path):
    with pytest.raises(ConfigError, match="no passages"):
        DenseIndex.in_memory([], settings())
    with pytest.raises(ConfigError, match="no passages"):
        build([], tmp_path, settings(), "f", quiet)


# Indexes in folders.


@pytest.mark.parametrize("kind", ["flat", "hnsw", "ivf"])
def test_a_built_index_finds_what_one_in_memory_finds(settings, passages, tmp_path, kind):
    wanted = settings(kind=kind, probes=400)  # hnsw, so wide, is exact
    heard = []
    build(passages, tmp_path / "index", wanted, "print", lambda done, total: heard.append((done, total)))
    loaded = DenseIndex.load(tmp_path / "index", passages, wanted, "print")
    queries = sentences(20, seed=3)
    assert ids(loaded.search(queries, 5)) == ids(DenseIndex.in_memory(passages, wanted).search(queries, 5))
    assert heard == [(400, 400)]
    assert sorted(path.name for path in (tmp_path / "index").iterdir()) == ["index.faiss", "manifest.json"]


def test_a_loaded_index_is_mapped_and_not_read(settings, passages, tmp_path):
    """The file is seen among the process's maps as long as the index lives."""
    build(passages, tmp_path, settings(), "print", quiet)
    index = DenseIndex.load(tmp_path, passages, settings(), "print")
    with open("/proc/self/maps") as maps:  # noqa: PTH123
        assert str(tmp_path / "index.faiss") in maps.read()
    assert len(index.search(["peru"], 3)[0]) == 3


def test_the_query_side_may_change_without_a_new_index(settings, passages, tmp_path):
    build(passages, tmp_path, settings(), "print", quiet)
    changed = settings(query_prefix="find: ", max_query_tokens=128, batch=5, probes=3)
    assert len(DenseIndex.load(tmp_path, passages, changed, "print").search(["peru"], 3)[0]) == 3


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"family": "other"}, "encoder '.*bert', now '.*other'"),
        ({"pooling": "cls"}, "pooling 'mean', now 'cls'"),
        ({"passage_prefix": "text: "}, "passage_prefix 'passage: ', now 'text: '"),
        ({"max_passage_tokens": 32}, "max_passage_tokens 64, now 32"),
        ({"normalize": False}, "normalize True, now False"),
        ({"kind": "ivf"}, "kind 'flat', now 'ivf'"),
    ],
)
def test_an_index_made_with_other_settings_is_refused_with_the_difference(settings, passages, tmp_path, changed, named):
    build(passages, tmp_path, settings(), "print", quiet)
    with pytest.raises(ConfigError, match=f"retriever.index {tmp_path} .*{named}"):
        DenseIndex.load(tmp_path, passages, settings(**changed), "print")


def test_an_index_of_another_corpus_is_refused(settings, passages, tmp_path):
    build(passages, tmp_path, settings(), "print", quiet)
    with pytest.raises(ConfigError, match=f"retriever.index {tmp_path} .*corpus 'print', now 'other'"):
        DenseIndex.load(tmp_path, passages, settings(), "other")
    with pytest.raises(ConfigError, match="passages 400, now 399"):
        DenseIndex.load(tmp_path, passages[:-1], settings(), "print")


def test_an_encoder_whose_weights_have_changed_in_its_folder_is_refused(encoders, passages, tmp_path):
    shutil.copytree(encoders["bert"], tmp_path / "model")
    wanted = DenseConfig(encoder=str(tmp_path / "model"))
    build(passages[:50], tmp_path / "index", wanted, "print", quiet)
    shutil.copytree(encoders["other"], tmp_path / "model", dirs_exist_ok=True)
    with pytest.raises(ConfigError, match="is of another encoder"):
        DenseIndex.load(tmp_path / "index", passages[:50], wanted, "print")
    shutil.rmtree(tmp_path / "model")
    save_model(tmp_path / "model", BertModel, BertConfig(**{**SMALL, "hidden_size": 48}))
    with pytest.raises(ConfigError, match=r"dim 32.*dim 48"):
        DenseIndex.load(tmp_path / "index", passages[:50], wanted, "print")


def test_a_folder_without_a_finished_index_says_how_to_make_one(settings, passages, tmp_path):
    with pytest.raises(ConfigError, match="holds no index; make it with `cusearch index CONFIG`"):
        DenseIndex.load(tmp_path, passages, settings(), "print")
    interrupt(passages, tmp_path, settings(), after=400)
    with pytest.raises(ConfigError, match="holds an unfinished index; make it with `cusearch index CONFIG`"):
        DenseIndex.load(tmp_path, passages, settings(), "print")


def other_dimension(path):
    """A whole index, but not ours."""
    index = faiss.IndexFlatIP(16)
    index.add(np.zeros((800, 16), dtype=np.float32))
    faiss.write_index(index, str(path))


@pytest.mark.parametrize("kind", ["flat", "hnsw", "ivf"])
@pytest.mark.parametrize(
    ("name", "damage", "named"),
    [
        ("index.faiss", lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes instead of"),
        ("index.faiss", lambda path: path.write_bytes(b"\0" * path.stat().st_size), "index.faiss"),
        ("index.faiss", lambda path: path.unlink(), "index.faiss"),
        ("manifest.json", lambda path: path.write_bytes(path.read_bytes()[:50]), "manifest.json"),
        ("manifest.json", lambda path: path.write_text("[]"), "manifest.json"),
    ],
)
def test_a_damaged_index_is_named(settings, passages, tmp_path, kind, name, damage, named):
    build(passages[:50], tmp_path, settings(kind=kind), "print", quiet)
    damage(tmp_path / name)
    with pytest.raises(ConfigError, match=f"retriever.index {tmp_path} is damaged .*{named}.*delete it"):
        DenseIndex.load(tmp_path, passages[:50], settings(kind=kind), "print")


def test_an_index_of_the_right_size_with_other_vectors_is_damaged(settings, passages, tmp_path):
    build(passages, tmp_path, settings(), "print", quiet)
    other_dimension(tmp_path / "index.faiss")
    with pytest.raises(ConfigError, match=r"is damaged .*800 vectors of 16 numbers instead of 400 of 32"):
        DenseIndex.load(tmp_path, passages, settings(), "print")


# Interruption.


class Killed(BaseException):
    pass


def interrupt(passages, folder, settings, after, fingerprint="print"):
    """A build that ends when `after` passages have been encoded."""

    def die(done, total):
        if done >= after:
            raise Killed

    with pytest.raises(Killed):
        build(passages, folder, settings, fingerprint, die)


@pytest.fixture(scope="module")
def many():
    """More than two chunks."""
    return [{"id": str(row), "contents": text[:7]} for row, text in enumerate(sentences(2 * CHUNK + 50, seed=4))]


@pytest.fixture(scope="module")
def undisturbed(many, settings, tmp_path_factory):
    """The bytes of the index of `many`, made in one go, by kind."""
    made = {}
    for kind in ("flat", "ivf"):
        folder = tmp_path_factory.mktemp(kind)
        build(many, folder, settings(kind=kind, max_passage_tokens=16), "print", quiet)
        made[kind] = (folder / "index.faiss").read_bytes()
    return made


@pytest.mark.parametrize(
    ("kind", "after", "torn"), [("flat", CHUNK, True), ("ivf", 2 * CHUNK, False), ("flat", 2 * CHUNK + 50, False)]
)
def test_an_interrupted_build_goes_on_to_the_same_bytes(
    settings, many, undisturbed, tmp_path, caplog, kind, after, torn
):
    wanted = settings(kind=kind, max_passage_tokens=16)
    interrupt(many, tmp_path, wanted, after)
    if torn:  # killed while the next chunk was being written
        with (tmp_path / "vectors.f32").open("ab") as file:
            file.write(b"\x7f" * 4321)
    heard = []
    with caplog.at_level(logging.INFO):
        build(many, tmp_path, wanted, "print", lambda done, total: heard.append(done))
    assert heard == [done for done in (CHUNK, 2 * CHUNK, 2 * CHUNK + 50) if done >= after]
    assert f"after {after} of {len(many)}" in caplog.text
    assert (tmp_path / "index.faiss").read_bytes() == undisturbed[kind]


def test_what_was_encoded_before_an_interruption_is_kept_and_not_encoded_again(settings, many, tmp_path):
    """A mark in the first vectors is still there in the end."""
    wanted = settings(max_passage_tokens=16)
    interrupt(many, tmp_path, wanted, CHUNK)
    mark = np.full(32, 7.0, dtype=np.float32).tobytes()
    with (tmp_path / "vectors.f32").open("r+b") as file:
        file.write(mark)
    build(many, tmp_path, wanted, "print", quiet)
    assert mark in (tmp_path / "index.faiss").read_bytes()


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda folder: cut(folder / "progress.json"), "cannot be read"),
        (lambda folder: (folder / "progress.json").write_text("[]"), "cannot be read"),
        (lambda folder: cut(folder / "vectors.f32"), "fewer than the 400 vectors"),
        (lambda folder: (folder / "vectors.f32").unlink(), "cannot be read"),
    ],
)
def test_beginnings_that_are_damaged_are_said_so_and_made_again(settings, passages, tmp_path, caplog, harm, said):
    build(passages, tmp_path / "whole", settings(), "print", quiet)
    interrupt(passages, tmp_path / "index", settings(), 400)
    harm(tmp_path / "index")
    build(passages, tmp_path / "index", settings(), "print", quiet)
    assert said in caplog.text
    assert "starting over" in caplog.text
    for name in ("index.faiss", "manifest.json"):
        assert (tmp_path / "index" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(
    ("changed", "fingerprint", "said"),
    [
        ({"pooling": "cls"}, "print", "pooling"),
        ({"family": "other"}, "print", "encoder"),
        ({}, "other", "corpus 'print', now 'other'"),
    ],
)
def test_beginnings_of_another_index_are_not_gone_on_with(
    settings, passages, tmp_path, caplog, changed, fingerprint, said
):
    interrupt(passages, tmp_path / "index", settings(), 400)
    wanted = settings(**changed)
    for name in ("index", "whole"):
        build(passages, tmp_path / name, wanted, fingerprint, quiet)
    assert said in caplog.text
    assert (tmp_path / "index" / "index.faiss").read_bytes() == (tmp_path / "whole" / "index.faiss").read_bytes()


def test_the_index_that_was_there_serves_until_the_new_one_is_written(settings, passages, tmp_path):
    build(passages, tmp_path, settings(), "print", quiet)
    interrupt(passages, tmp_path, settings(pooling="cls"), 400)
    old = DenseIndex.load(tmp_path, passages, settings(), "print")
    before = old.search(["peru"], 3)
    build(passages, tmp_path, settings(pooling="cls"), "print", quiet)
    assert old.search(["peru"], 3) == before, "a process that has it mapped keeps it"
    DenseIndex.load(tmp_path, passages, settings(pooling="cls"), "print")
