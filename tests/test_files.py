"""Files and folders that are there whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from cusearch_async import files
from cusearch_async.errors import ConfigError, WriteFailed
from cusearch_async.files import (
    append_row,
    put_in_place,
    refuse_unwritable,
    try_lock,
    whole_or_absent,
    write_file,
    writing,
    writing_output,
)

NAME = re.compile(r"v(\d+)")


def write(target: Path, text: str = "text") -> None:
    with writing(target) as folder:
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "file").write_text(text)
        (folder / "manifest.json").write_text("{}")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def disk_full(handle: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_takes_the_place_of_the_one_before_and_nothing_else_is_left(tmp_path: Path):
    target = tmp_path / "manifest.json"
    for content in (b"first, and long", b"second"):
        write_file(target, content)
        assert target.read_bytes() == content
    assert names(tmp_path) == ["manifest.json"]


def test_a_file_that_is_not_to_be_replaced_stays(tmp_path: Path):
    write_file(tmp_path / "run.json", b"first", replace=False)
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "run.json", b"second", replace=False)
    assert (tmp_path / "run.json").read_bytes() == b"first"
    assert names(tmp_path) == ["run.json"]


def test_on_a_full_disk_the_file_before_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_file(tmp_path / "manifest.json", b"first")
    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space left"):
        write_file(tmp_path / "manifest.json", b"second")
    assert (tmp_path / "manifest.json").read_bytes() == b"first"
    assert names(tmp_path) == ["manifest.json"]


def test_a_folder_has_its_name_when_it_is_put_in_place_and_not_before(tmp_path: Path):
    target = tmp_path / "store" / "v1"
    write(target)
    assert names(tmp_path / "store") == [".unfinished-v1"]
    put_in_place(target)
    assert names(tmp_path / "store") == ["v1"]
    assert (target / "deep" / "file").read_text() == "text"


def test_what_an_interrupted_write_left_is_not_mixed_with_the_next(tmp_path: Path):
    left = tmp_path / ".unfinished-v1" / "old"
    left.mkdir(parents=True)
    write(tmp_path / "v1")
    put_in_place(tmp_path / "v1")
    assert names(tmp_path / "v1") == ["deep", "manifest.json"]


def test_all_of_it_is_on_disk_before_it_has_its_name_and_then_the_name(tmp_path: Path, monkeypatch):
    """Names as well: a file whose folder was not flushed is gone after a power cut."""
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(Path(f"/proc/self/fd/{handle}").readlink()))
    unfinished = tmp_path / ".unfinished-v1"
    write(tmp_path / "v1")
    assert set(synced) == {unfinished, *unfinished.rglob("*")}
    assert [path.name for path in sorted(synced)] == [".unfinished-v1", "deep", "file", "manifest.json"]
    assert synced[-1] == unfinished
    put_in_place(tmp_path / "v1")
    assert synced[4:] == [tmp_path]


def test_a_file_replaces_the_one_before_and_a_folder_does_not(tmp_path: Path):
    for text in ("first", "second"):
        with writing(tmp_path / "file") as path:
            path.write_text(text)
        put_in_place(tmp_path / "file")
        assert (tmp_path / "file").read_text() == text
    write(tmp_path / "v1", "first")
    put_in_place(tmp_path / "v1")
    write(tmp_path / "v1", "second")
    with pytest.raises(WriteFailed, match=r"cannot write .*unfinished-v1: Directory not empty"):
        put_in_place(tmp_path / "v1")
    assert (tmp_path / "v1" / "deep" / "file").read_text() == "first"
    assert names(tmp_path) == ["file", "v1"]


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(WriteFailed, match=r"^cannot write .*/\.unfinished-v1: No space left on device$"):
        write(tmp_path / "v1")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.EROFS, "Read-only file system"), "Read-only file system"),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), "No space left"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 14592 vs 14486"), "unexpected pos"),
        (Exception("No space left on device (os error 28)"), "No space left"),
        (RuntimeError("Error in faiss/impl/io.cpp:88: write error in x: 9 != 10 (No space left)"), "write error in x"),
    ],
)
def test_a_disk_that_refuses_is_named_in_one_line_and_leaves_no_half_folder(tmp_path: Path, error, reason):
    folder = tmp_path / "v000003-e1"

    def write() -> None:
        with whole_or_absent(folder):
            folder.mkdir()
            (folder / "model.safetensors").write_bytes(b"half")
            raise error

    with pytest.raises(WriteFailed, match=f"^cannot write {folder}: .*{reason}"):
        write()
    assert not folder.exists()


def test_what_another_process_could_not_write_is_removed_too(tmp_path: Path):
    """A learner's other rank writes into the same checkpoint. Before, this rank's part stayed on the full disk."""
    folder = tmp_path / "step000003-e1"
    error = WriteFailed("rank 1 cannot write its part: No space left on device")

    def write() -> None:
        with whole_or_absent(folder):
            folder.mkdir()
            (folder / "rank0.safetensors").write_bytes(b"whole")
            raise error

    with pytest.raises(WriteFailed) as raised:
        write()
    assert raised.value is error
    assert not folder.exists()


def test_a_programming_error_while_writing_stays_what_it_is(tmp_path: Path):
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(RuntimeError, match="mat1 and mat2"), whole_or_absent(tmp_path / "checkpoint"):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [OSError("1000000 requested and 393200 written"), Exception("os error 28")])
def test_a_full_disk_is_seen_where_a_library_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error):
    """numpy's errors have no number."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(WriteFailed, match=r": No space left on device$"), whole_or_absent(tmp_path / "v1"):
        raise error


def test_an_output_that_passed_the_first_check_is_written_though_its_folder_is_missing(tmp_path: Path):
    """Or hours of work would be lost to it."""
    output = tmp_path / "not" / "there" / "yet.json"
    refuse_unwritable(output, "--output")
    assert not output.parent.exists()
    with writing_output(output, "--output"):
        output.write_text("1")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--output .*/file/x cannot be written: Not a directory; choose another"):
        refuse_unwritable(tmp_path / "file" / "x", "--output")


def test_a_row_after_an_incomplete_line_has_a_separate_line(tmp_path: Path):
    path = tmp_path / "eval.jsonl"
    append_row(path, {"step": 0})
    with path.open("a") as file:
        file.write('{"step": 1, "re')
    append_row(path, {"step": 2})
    assert path.read_text() == '{"step": 0}\n{"step": 1, "re\n{"step": 2}\n'


def test_a_row_that_cannot_be_written_is_one_line_that_names_the_file(tmp_path: Path):
    with pytest.raises(WriteFailed, match=r"^cannot write .*absent/metrics.jsonl: No such file or directory$"):
        append_row(tmp_path / "absent" / "metrics.jsonl", {"step": 0})


def test_entries_are_what_has_such_a_name_whole_or_not(tmp_path: Path):
    for name in ("v2", ".unfinished-v3", "notes", "v10x", ".v4"):
        (tmp_path / name).mkdir()
    found = files.entries(tmp_path, NAME)
    assert [(path.name, name[1]) for path, name in found] == [(".unfinished-v3", "3"), ("v2", "2")]
    assert files.entries(tmp_path / "absent", NAME) == []


def test_a_folder_without_its_manifest_is_half_done(tmp_path: Path):
    write(tmp_path / "v1")
    assert files.is_half_done(tmp_path / ".unfinished-v1", "manifest.json"), "sealed, but without its name"
    put_in_place(tmp_path / "v1")
    assert not files.is_half_done(tmp_path / "v1", "manifest.json")
    (tmp_path / "v1" / "manifest.json").unlink()
    assert files.is_half_done(tmp_path / "v1", "manifest.json")


def test_a_folder_that_is_deleted_loses_its_manifest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path / "v1")
    put_in_place(tmp_path / "v1")
    gone: list[str] = []
    remove = files.remove
    monkeypatch.setattr(files, "remove", lambda path: (gone.append(path.name), remove(path)))
    files.remove_sealed(tmp_path / "v1", "manifest.json")
    assert gone == ["manifest.json", "v1"]
    assert names(tmp_path) == []


def test_a_lock_is_one_owners_or_shared_and_ends_with_its_file(tmp_path: Path):
    with (tmp_path / "lock").open("a+") as one, (tmp_path / "lock").open("a+") as two:
        assert try_lock(one, fcntl.LOCK_EX)
        assert not try_lock(two, fcntl.LOCK_SH)
        one.close()
        assert try_lock(two, fcntl.LOCK_SH)
        with (tmp_path / "lock").open("a+") as three:
            assert try_lock(three, fcntl.LOCK_SH)
            assert not try_lock(three, fcntl.LOCK_EX)
