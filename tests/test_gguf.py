"""A GGUF file becomes a model folder, or is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from cusearch_async.errors import ConfigError
from cusearch_async.gguf import convert


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"PK\x03\x04 a wheel", r"is no GGUF file: it begins with b'PK\\x03\\x04'"),
        (b"GGUF", "cannot be converted: "),
        (b"GGUF" + bytes(60), "cannot be converted: "),
    ],
)
def test_what_is_no_model_is_refused_and_nothing_is_left(tmp_path: Path, content: bytes | None, problem: str):
    file = tmp_path / "a.gguf"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        convert(file, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ([] if content is None else ["a.gguf"])


def test_a_folder_that_exists_is_not_written_into(tmp_path: Path):
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match="model exists; choose another folder, or delete it"):
        convert(tmp_path / "a.gguf", tmp_path / "model")
