"""Who takes which GPU on other file systems and machines."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest

from cusearch_async.errors import ConfigError
from cusearch_async.lifecycle import cuda, gpus
from tests.lifecycle.test_gpus import cards, config_of, release, take_for_worker

__all__ = ["cards", "config_of"]


def test_locks_on_nfs_are_taken_again_after_a_process_has_ended(cards, config_of, monkeypatch):
    """There only a file that can be written is locked alone: every later start ended with a traceback."""
    cards("0")
    flock = fcntl.flock

    def of_nfs(file, how):
        if how & fcntl.LOCK_EX and not fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE:
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", of_nfs)
    for _ in range(2):
        assert take_for_worker(config_of()) == ("0",)
        release()


def test_a_folder_without_locks_is_named(cards, config_of, monkeypatch):
    cards("0")

    def none(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(ConfigError, match=r"cannot be locked \(Function not implemented\); set TMPDIR"):
        take_for_worker(config_of())


def test_a_gpu_of_another_machine_with_the_same_tmpdir_is_not_taken(cards, config_of, tmp_path, monkeypatch):
    """With TMPDIR on a cluster's scratch a job on one node refused to start beside that on another."""
    cards("0")
    (tmp_path / "boot").write_text("another-machine\n")
    assert take_for_worker(config_of()) == ("0",)
    monkeypatch.setattr(gpus, "BOOT", tmp_path / "boot")
    assert take_for_worker(config_of()) == ("0",)


def test_under_windows_the_gpus_are_those_that_nvidia_smi_lists(tmp_path, monkeypatch):
    """No file tells of them there: nobody got a GPU of its own, and learner and engine took the first."""
    for name in ("CARD", "DRIVER"):
        monkeypatch.setattr(cuda, name, tmp_path / "none")
    monkeypatch.setattr(gpus, "DEVICES", tmp_path / "none")
    monkeypatch.setattr(gpus, "has_card", cuda.has_card)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 'GPU 0: RTX (UUID: a)'\necho 'GPU 1: RTX (UUID: b)'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    cuda.count_in_wsl.cache_clear()
    assert gpus.list_gpus() == ()
    (tmp_path / "dxg").touch()
    monkeypatch.setattr(cuda, "DXG", tmp_path / "dxg")
    cuda.count_in_wsl.cache_clear()
    assert gpus.list_gpus() == ("0", "1")
    cuda.count_in_wsl.cache_clear()
