"""FAISS indexes in memory and in folders."""

from __future__ import annotations

import shutil
import subprocess
import sys

import faiss
import numpy as np
import pytest
from transformers import BertConfig, BertModel

from cusearch_async.config import DenseConfig
from cusearch_async.errors import ConfigError
from cusearch_async.retrieval.dense import DenseIndex, Encoder, build
from tests.retrieval.dense.builds import ids, interrupt, quiet
from tests.retrieval.encoders import SMALL, corpus, save_model, sentences

pytestmark = pytest.mark.system


# Search.

ADDING = """
import numpy as np
from cusearch_async.config import DenseConfig
from cusearch_async.retrieval.dense import _index_of

def most():
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

_index_of(np.zeros((1000, 256), np.float32), DenseConfig(encoder="e"))
before = most()
_index_of(np.ones((17 * 65_536, 256), np.float32), DenseConfig(encoder="e"))
print(most() - before)
"""


def test_an_index_is_never_held_twice_while_it_is_made():
    """It was added to in blocks: at the last doubling of its room 60 GiB were 96."""
    done = subprocess.run([sys.executable, "-c", ADDING], capture_output=True, text=True, check=True)
    mib = 17 * 65_536 * 256 * 4 / 2**20
    assert 1.9 * mib < float(done.stdout) < 2.3 * mib, "the vectors, and the index"


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
    with pytest.raises(ConfigError, match="was made with another encoder"):
        DenseIndex.load(tmp_path / "index", passages[:50], wanted, "print")
    shutil.rmtree(tmp_path / "model")
    save_model(tmp_path / "model", BertModel, BertConfig(**{**SMALL, "hidden_size": 48}))
    with pytest.raises(ConfigError, match=r"dim 32.*dim 48"):
        DenseIndex.load(tmp_path / "index", passages[:50], wanted, "print")


def test_a_folder_without_a_finished_index_says_how_to_make_one(settings, passages, tmp_path):
    with pytest.raises(ConfigError, match="holds no index; build it with `cusearch index CONFIG`"):
        DenseIndex.load(tmp_path, passages, settings(), "print")
    interrupt(passages, tmp_path, settings(), after=400)
    with pytest.raises(ConfigError, match="holds an unfinished index; build it with `cusearch index CONFIG`"):
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


def test_the_index_that_was_there_serves_until_the_new_one_is_written(settings, passages, tmp_path):
    build(passages, tmp_path, settings(), "print", quiet)
    interrupt(passages, tmp_path, settings(pooling="cls"), 400)
    old = DenseIndex.load(tmp_path, passages, settings(), "print")
    before = old.search(["peru"], 3)
    build(passages, tmp_path, settings(pooling="cls"), "print", quiet)
    assert old.search(["peru"], 3) == before, "a process that has it mapped keeps it"
    DenseIndex.load(tmp_path, passages, settings(pooling="cls"), "print")
