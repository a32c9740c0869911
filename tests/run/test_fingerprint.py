"""A checksum that sees any edit of a small file, and any other length."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cusearch_async.run import provenance as module
from cusearch_async.run.provenance import fingerprint, fingerprint_of_file


@given(size=st.integers(1, 64 * 16), data=st.data())
def test_every_byte_of_a_file_of_64_pieces_counts(size, data):
    piece, module._PIECE = module._PIECE, 16
    try:
        content = bytearray(size)
        before = fingerprint(bytes(content))
        content[data.draw(st.integers(0, size - 1))] ^= 1
        assert fingerprint(bytes(content)) != before
        assert fingerprint(bytes(size + 1)) != before
    finally:
        module._PIECE = piece


def test_a_file_has_the_fingerprint_of_its_content(tmp_path):
    for content in (b"", b"text", bytes(3_000_000)):
        (tmp_path / "file").write_bytes(content)
        assert fingerprint_of_file(tmp_path / "file") == fingerprint(content)


def test_the_fingerprint_of_a_corpus_is_what_manifests_of_indexes_have():
    assert fingerprint(b'{"id": "0", "contents": "a"}\n') == "8eb1ea8122ce5f8f0d54f3ba0cd2906e"
