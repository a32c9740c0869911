"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cusearch_async.files import write_whole
from cusearch_async.training.log import MetricsLog


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


def test_a_learner_that_resumes_on_a_full_disk_loses_no_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = '{"step": 0}\n{"step": 1}\n'
    (tmp_path / "metrics.jsonl").write_text(rows)
    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space left"):
        MetricsLog(tmp_path, from_step=1)
    assert (tmp_path / "metrics.jsonl").read_text() == rows
