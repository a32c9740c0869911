"""The transport that a config names."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import asynccontextmanager

import pytest
import torch

from cusearch_async.config import load_config, shipped_configs
from cusearch_async.errors import ConfigError
from cusearch_async.weights.folder import FolderTransport, WeightStore
from cusearch_async.weights.http import HttpTransport
from cusearch_async.weights.interface import Canary
from cusearch_async.weights.transports import WeightTransport, transport_of
from tests.sockets import family, listening
from tests.weights.test_http import site

__all__ = ["site"]

CANARY = Canary([1, 2], [-0.5], 0.1)


class Mirror:
    """A custom transport: versions are published into one folder, and copied to another."""

    def __init__(self, config):
        self.folder = config.folder

    def store(self):
        return WeightStore(self.folder / "here")

    @asynccontextmanager
    async def serving(self):
        yield

    @asynccontextmanager
    async def source(self, needs_last=False):
        (self.folder / "here").rename(self.folder / "there")
        yield WeightStore(self.folder / "there")


class NoSource:
    def store(self): ...


def config(tmp_path, transport, *options):
    options = ["--run.folder", str(tmp_path), "--weights.transport", transport, *options]
    return load_config(shipped_configs()["atlas"], options)


async def test_a_shared_folder_needs_no_server(tmp_path):
    transport = transport_of(config(tmp_path, "folder"))
    assert isinstance(transport, FolderTransport)
    before = listening(*family(os.getpid()))
    name = transport.store().publish(1, 1, {"w": torch.ones(2)}, CANARY)
    async with transport.serving(), transport.source() as source:
        assert (await source.open(name)).directory == tmp_path / "weights" / name
        assert listening(*family(os.getpid())) == before


def test_the_shipped_ones_have_the_shape_of_a_transport(tmp_path):
    with_http = transport_of(config(tmp_path, "http", "--weights.url", "http://127.0.0.1:29400"))
    assert isinstance(with_http, HttpTransport)
    for kind in (FolderTransport, HttpTransport):
        assert issubclass(kind, WeightTransport)


async def test_a_custom_transport_is_named_by_its_class(tmp_path):
    transport = transport_of(config(tmp_path, f"{__name__}:Mirror"))
    name = transport.store().publish(1, 1, {"w": torch.ones(2)}, CANARY)
    async with transport.serving(), transport.source() as source:
        assert (await source.open(name)).directory == tmp_path / "there" / name


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (
            "nccl",
            r"weights.transport 'nccl' is unknown; use one of folder, http, object, or your own as package.module:Name",
        ),
        (f"{__name__}:NoSource", r"must be a subclass of cusearch_async.weights.transports.WeightTransport, got"),
    ],
)
def test_what_is_no_transport_is_refused(named, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        transport_of(config(tmp_path, named))


async def test_where_nothing_can_be_locked_copies_are_refused(site, monkeypatch):
    """Two workers wrote one copy, and one of them loaded half of it."""

    def without_locks(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    name = site.publish(1)
    monkeypatch.setattr(fcntl, "flock", without_locks)
    async with site.learner.serving(), site.host() as downloads:
        with pytest.raises(
            ConfigError, match=r"\.lock cannot be locked \(Function not .* with locks, .* \(weights\.folder; of a"
        ):
            await downloads.open(name)
