"""The weight store: one directory per published version, complete or absent.

    <store>/v000012-e3/model.safetensors   the policy's parameters, by Hugging Face names
    <store>/v000012-e3/manifest.json       shape, dtype and checksum of every tensor, and a canary

or, where an adapter is trained, the adapter alone, as peft and vLLM read it:

    <store>/v000012-e3/adapter_model.safetensors, adapter_config.json, manifest.json

A version is written under a temporary name and renamed; only then is it announced in Redis. The name holds the
version (learner steps) and the epoch of the learner, so no name is ever used twice.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from cusearch_async.config import Config
from cusearch_async.errors import WeightsUnavailable
from cusearch_async.files import entries, is_half_done, put_in_place, remove, remove_sealed, writing
from cusearch_async.weights.interface import ADAPTER_CONFIG, MANIFEST, Canary, Manifest, OpenedVersion
from cusearch_async.weights.tensor_file import BadTensorFile, records_of, write_tensors

NAME = re.compile(r"v(\d{6,})-e(\d+)(?:-(\d+))?", re.ASCII)
"""Valid names of versions. Names come from Redis, and must not point outside the store."""
KEPT = 3
"""The newest versions, which stay."""


class WeightStore:
    """Published weight versions in a folder that learner and workers share."""

    def __init__(self, folder: Path, keeps: Callable[[int], bool] = lambda version: False) -> None:
        """`keeps` tells which versions are kept besides the newest."""
        self.folder = folder
        self._keeps = keeps

    def highest_epoch(self) -> int:
        """The highest epoch of all entries, complete or not."""
        return max((int(name[2]) for _, name in self._entries()), default=0)

    def names(self) -> list[str]:
        """Of the versions that are there, oldest first."""
        return sorted((path.name for path, _ in self._entries() if path.name.startswith("v")), key=order_of)

    async def newest_of(self, version: int) -> str | None:
        """The name of a version that is still there, by the latest learner that published it."""
        return newest_of(version, self.names())

    def begin(self, epoch: int) -> None:
        """Delete what learners of earlier epochs left unfinished."""
        for path, name in self._entries():
            if is_half_done(path, MANIFEST) and int(name[2]) < epoch:
                remove(path)

    def publish(
        self,
        version: int,
        epoch: int,
        tensors: Mapping[str, torch.Tensor],
        canary: Canary,
        copied: Callable[[], None] = lambda: None,
        adapter: Mapping[str, Any] | None = None,
    ) -> str:
        """Write a version, or with peft's config `adapter` an adapter; returns its directory name. A version that is
        published again gets a new name. The last `keep` versions stay on disk, and all versions of later learners.
        `copied` is called as soon as the tensors may change, also when nothing could be written. Nothing is synced to
        disk: after a crash of the machine a learner publishes its weights again, and checksums refuse an incomplete
        version.

        Raises: WriteFailed."""
        with ExitStack() as lent:
            lent.callback(copied)
            name = f"v{version:06d}-e{epoch}"
            before = [number for *of_one, number in map(order_of, self.names()) if of_one == [epoch, version]]
            if before:
                name += f"-{max(before) + 1}"
            manifest = Manifest(version, epoch, {}, canary, None if adapter is None else dict(adapter))
            with writing(self.folder / name, durable=False) as folder:
                folder.mkdir()
                write_tensors(folder / manifest.file, tensors)
        with writing(self.folder / name, durable=False, begun=True) as folder:
            manifest.tensors = records_of(folder / manifest.file)
            if adapter is not None:
                (folder / ADAPTER_CONFIG).write_bytes(msgspec.json.encode(adapter))
            (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))
        put_in_place(self.folder / name, durable=False)
        self._remove_old(epoch)
        self._hand_on(name, manifest)
        return name

    def _hand_on(self, name: str, manifest: Manifest) -> None:
        """Put a version that is written where sources find it, if that is not here."""

    def verify(self, name: str) -> Manifest:
        """The manifest of a version, after all its tensors were checked against it.

        Raises: WeightsUnavailable that names the directory, the tensor, or the invalid name."""
        directory = self.directory(name)
        manifest = read_manifest(directory, name)
        try:
            found = records_of(directory / manifest.file)
            adapter = manifest.adapter and msgspec.json.decode((directory / ADAPTER_CONFIG).read_bytes())
        except (OSError, msgspec.MsgspecError, BadTensorFile) as error:
            raise WeightsUnavailable(f"{directory} is missing or damaged: {error}") from error
        if found.keys() != manifest.tensors.keys():
            raise WeightsUnavailable(f"{directory}: tensors and manifest name different parameters")
        for key, expected in manifest.tensors.items():
            if found[key] != expected:
                raise WeightsUnavailable(f"{directory}: tensor {key} does not match its checksum")
        if adapter != manifest.adapter:
            raise WeightsUnavailable(f"{directory}: {ADAPTER_CONFIG} differs from the manifest")
        return manifest

    async def open(self, name: str) -> OpenedVersion:
        """A version that has been verified, in a thread. Raises: WeightsUnavailable."""
        return OpenedVersion(name, await asyncio.to_thread(self.verify, name), self.directory(name))

    def directory(self, name: str) -> Path:
        """The directory of a version, which may not exist. Raises: WeightsUnavailable for a name that is not a
        version's, or that points outside the store."""
        if not NAME.fullmatch(name):
            raise WeightsUnavailable(f"{name!r:.200} is not the name of a weight version (like v000012-e3)")
        found, store = (self.folder / name).resolve(), self.folder.resolve()
        if found.parent != store:
            raise WeightsUnavailable(f"{self.folder / name} points outside the weight store: {found}")
        return found

    def _remove_old(self, epoch: int) -> None:
        names = [name for name in self.names() if order_of(name)[0] <= epoch]
        for name in set(names) - self._kept(names, KEPT):
            remove_sealed(self.folder / name, MANIFEST)

    def _kept(self, names: Sequence[str], count: int) -> set[str]:
        """Those of these versions that are still needed."""
        ordered = sorted(names, key=order_of)
        of_versions = {order_of(name)[1]: name for name in ordered}  # the newest of each, as only that is opened
        return {*ordered[-count:], *(name for version, name in of_versions.items() if self._keeps(version))}

    def _entries(self) -> list[tuple[Path, re.Match[str]]]:
        return entries(self.folder, NAME)


class FolderTransport:
    """Learner, workers and evaluator share a folder."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def store(self) -> WeightStore:
        return WeightStore(self._config.weights_folder, keeps=self._config.eval.keeps)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def source(self, needs_last: bool = False) -> AsyncIterator[WeightStore]:
        yield WeightStore(self._config.weights_folder)


def read_manifest(directory: Path, name: str) -> Manifest:
    """Of the version `name`. Raises: WeightsUnavailable."""
    try:
        manifest = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise WeightsUnavailable(f"{directory} is missing or damaged: {error}") from error
    if name.split("-")[:2] != [f"v{manifest.version:06d}", f"e{manifest.epoch}"]:
        raise WeightsUnavailable(f"{directory} has the manifest of v{manifest.version:06d}-e{manifest.epoch}")
    return manifest


def newest_of(version: int, names: Sequence[str]) -> str | None:
    """The last of `names` that is of this version."""
    return next((name for name in reversed(names) if name.startswith(f"v{version:06d}-")), None)


def order_of(name: str) -> tuple[int, int, int]:
    """Epoch, version, and how often the learner has published it: names of versions, oldest first."""
    match = NAME.fullmatch(name)
    assert match is not None, name
    return int(match[2]), int(match[1]), int(match[3] or 1)


def epoch_of(name: str) -> int:
    """Epoch of the learner that published the version of this name; 0 for a name that is not a version's."""
    return order_of(name)[0] if NAME.fullmatch(name) else 0
