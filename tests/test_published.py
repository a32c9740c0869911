"""What is published is there whole or not at all."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from cusearch_async import published
from cusearch_async.errors import WriteFailed

NAME = re.compile(r"v(\d+)")


def write(target: Path, text: str = "text") -> None:
    with published.writing(target) as folder:
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "file").write_text(text)
        (folder / "manifest.json").write_text("{}")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_has_its_name_when_it_is_published_and_not_before(tmp_path: Path):
    target = tmp_path / "store" / "v1"
    write(target)
    assert names(tmp_path / "store") == [".unfinished-v1"]
    published.publish(target)
    assert names(tmp_path / "store") == ["v1"]
    assert (target / "deep" / "file").read_text() == "text"


def test_what_an_interrupted_write_left_is_not_mixed_with_the_next(tmp_path: Path):
    left = tmp_path / ".unfinished-v1" / "old"
    left.mkdir(parents=True)
    write(tmp_path / "v1")
    published.publish(tmp_path / "v1")
    assert names(tmp_path / "v1") == ["deep", "manifest.json"]


def test_all_of_it_is_on_disk_before_it_has_its_name_and_then_the_name(tmp_path: Path, monkeypatch):
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(Path(f"/proc/self/fd/{handle}").readlink().name))
    write(tmp_path / "v1")
    assert sorted(synced) == [".unfinished-v1", "deep", "file", "manifest.json"]
    published.publish(tmp_path / "v1")
    assert synced[-1] == tmp_path.name


def test_a_file_replaces_the_one_before_and_a_folder_does_not(tmp_path: Path):
    for text in ("first", "second"):
        with published.writing(tmp_path / "file") as path:
            path.write_text(text)
        published.publish(tmp_path / "file")
        assert (tmp_path / "file").read_text() == text
    write(tmp_path / "v1", "first")
    published.publish(tmp_path / "v1")
    write(tmp_path / "v1", "second")
    with pytest.raises(WriteFailed, match=r"cannot write .*unfinished-v1: Directory not empty"):
        published.publish(tmp_path / "v1")
    assert (tmp_path / "v1" / "deep" / "file").read_text() == "first"
    assert names(tmp_path) == ["file", "v1"]


def test_a_disk_that_refuses_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch):
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteFailed, match=r"^cannot write .*/\.unfinished-v1: No space left on device$"):
        write(tmp_path / "v1")
    assert names(tmp_path) == []


def test_entries_are_what_has_such_a_name_whole_or_not(tmp_path: Path):
    for name in ("v2", ".unfinished-v3", "notes", "v10x", ".v4"):
        (tmp_path / name).mkdir()
    found = published.entries(tmp_path, NAME)
    assert [(path.name, name[1]) for path, name in found] == [(".unfinished-v3", "3"), ("v2", "2")]
    assert published.entries(tmp_path / "absent", NAME) == []


def test_a_folder_without_its_manifest_is_half_done(tmp_path: Path):
    write(tmp_path / "v1")
    assert published.is_half_done(tmp_path / ".unfinished-v1", "manifest.json"), "sealed, but without its name"
    published.publish(tmp_path / "v1")
    assert not published.is_half_done(tmp_path / "v1", "manifest.json")
    (tmp_path / "v1" / "manifest.json").unlink()
    assert published.is_half_done(tmp_path / "v1", "manifest.json")


def test_a_folder_that_is_deleted_loses_its_manifest_first(tmp_path: Path, monkeypatch):
    write(tmp_path / "v1")
    published.publish(tmp_path / "v1")
    gone: list[str] = []
    remove = published.remove
    monkeypatch.setattr(published, "remove", lambda path: (gone.append(path.name), remove(path)))
    published.delete(tmp_path / "v1", "manifest.json")
    assert gone == ["manifest.json", "v1"]
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_text("tExt"),
        lambda file: file.write_text("text and more"),
        lambda file: file.unlink(),
        lambda file: (file.unlink(), file.mkdir()),
    ],
)
def test_a_torn_file_is_named(tmp_path: Path, damage):
    write(tmp_path / "v1")
    published.publish(tmp_path / "v1")
    listed = published.list_files(tmp_path / "v1")
    assert list(listed) == ["deep/file", "manifest.json"]
    assert published.torn_files(tmp_path / "v1", listed) == []
    damage(tmp_path / "v1" / "deep" / "file")
    assert published.torn_files(tmp_path / "v1", listed) == ["deep/file"]
