"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from cusearch_async.errors import WriteFailed
from cusearch_async.files import append_row, sync_tree, write_whole, writing


def disk_full(handle: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_takes_the_place_of_the_one_before_and_nothing_else_is_left(tmp_path: Path):
    target = tmp_path / "manifest.json"
    for content in (b"first, and long", b"second"):
        write_whole(target, content)
        assert target.read_bytes() == content
    assert list(tmp_path.iterdir()) == [target]


def test_on_a_full_disk_the_file_before_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "manifest.json"
    write_whole(target, b"first")
    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(target, b"second")
    assert target.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [target]


def test_a_row_behind_a_torn_line_has_a_line_of_its_own(tmp_path: Path):
    path = tmp_path / "eval.jsonl"
    append_row(path, {"step": 0})
    with path.open("a") as file:
        file.write('{"step": 1, "re')
    append_row(path, {"step": 2})
    assert path.read_text() == '{"step": 0}\n{"step": 1, "re\n{"step": 2}\n'


def test_a_row_that_cannot_be_written_is_one_line_that_names_the_file(tmp_path: Path):
    with pytest.raises(WriteFailed, match=r"^cannot write .*absent/metrics.jsonl: No such file or directory$"):
        append_row(tmp_path / "absent" / "metrics.jsonl", {"step": 0})


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError(errno.EROFS, "Read-only file system"), "Read-only file system"),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), "No space left"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 14592 vs 14486"), "unexpected pos"),
    ],
)
def test_a_disk_that_refuses_is_named_in_one_line_and_leaves_no_half_folder(tmp_path: Path, error, reason):
    folder = tmp_path / "v000003-e1"

    def write() -> None:
        with writing(folder):
            folder.mkdir()
            (folder / "model.safetensors").write_bytes(b"half")
            raise error

    with pytest.raises(WriteFailed, match=f"^cannot write {folder}: .*{reason}"):
        write()
    assert not folder.exists()


def test_a_programming_error_while_writing_stays_what_it_is(tmp_path: Path):
    with pytest.raises(RuntimeError, match="mat1 and mat2"), writing(tmp_path / "checkpoint"):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def test_a_folder_is_safe_on_disk_with_all_that_is_below_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Names as well: a file whose folder was not flushed is gone after a power cut."""
    folder = tmp_path / "step000002-e1"
    for name in ("state.json", "model/config.json", "deepspeed/rank/optimizer.pt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(Path(f"/proc/self/fd/{handle}").readlink()))
    sync_tree(folder)
    assert set(synced) == {folder, *folder.rglob("*")}
    assert len(synced) == 1 + 3 + 3
    assert synced[-1] == folder
