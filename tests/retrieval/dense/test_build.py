"""Builds of an index that are interrupted and go on."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from cusearch_async.retrieval import manifest
from cusearch_async.retrieval.dense import CHUNK, build
from tests.retrieval.dense.builds import Killed, interrupt, quiet
from tests.retrieval.encoders import sentences

pytestmark = pytest.mark.system


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
    assert "starting again" in caplog.text
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


def test_a_note_does_not_speak_for_the_vectors_of_another_encoder(settings, passages, tmp_path, monkeypatch):
    """Killed between writing those and their note, and made with the first encoder again."""
    folder, write_json = tmp_path / "index", manifest.write_json

    def die(path, value):
        raise Killed

    interrupt(passages, folder, settings(), 400)
    monkeypatch.setattr(manifest, "write_json", die)
    with pytest.raises(Killed):
        build(passages, folder, settings(family="other"), "print", quiet)
    monkeypatch.setattr(manifest, "write_json", write_json)
    for name in ("index", "whole"):
        build(passages, tmp_path / name, settings(), "print", quiet)
    assert (folder / "index.faiss").read_bytes() == (tmp_path / "whole" / "index.faiss").read_bytes()
