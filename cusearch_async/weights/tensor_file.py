"""Writes and checks files of tensors in the safetensors format, through a mapping of the file.

The tensors are copied once, into pages that were allocated before: `safetensors.torch.save_file` takes many times as
long. Checksums are taken from the mapping, without a copy, and without Python's lock.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8
_LONGEST_HEADER = 100_000_000


class TensorRecord(msgspec.Struct):
    """What a tensor was when it was written."""

    shape: list[int]
    dtype: str
    """The format's name, like BF16."""
    xxh3: str


class BadTensorFile(ValueError):
    """A file is not a complete file of tensors."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor is, in bytes from the start of the file."""

    shape: list[int]
    dtype: str
    begin: int
    end: int


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a new file; the tensors may be on any device. Raises: OSError, also when the disk is full."""
    header, places = _layout(tensors)
    size = max([len(header), *(place.end for place in places.values())])
    with path.open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, and a signal while copying
        with mmap.mmap(file.fileno(), size) as mapped:
            mapped[: len(header)] = header
            for name, tensor in tensors.items():
                if tensor.numel():
                    into = torch.frombuffer(mapped, dtype=tensor.dtype, count=tensor.numel(), offset=places[name].begin)
                    into.copy_(tensor.detach().reshape(-1))
                    del into  # the mapping cannot be closed while a tensor points into it


def records_of(path: Path) -> dict[str, TensorRecord]:
    """Every tensor of a file with its checksum; reads all of it.

    Raises: OSError; BadTensorFile for anything but a whole file of tensors."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < _ALIGNMENT:
            raise BadTensorFile(f"{path.name} has {size} bytes")
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as content:
            if size < (start := _header_end(path.name, content)):
                raise BadTensorFile(f"{path.name} is incomplete: its header ends at byte {start} of {size}")
            places = _read_places(path.name, bytes(content[:start]))
            for name, place in places.items():
                if place.end > size:
                    raise BadTensorFile(f"{path.name} is incomplete: tensor {name} ends at byte {place.end} of {size}")
            return {name: TensorRecord(p.shape, p.dtype, _digest(content, p)) for name, p in places.items()}


class ArrivingTensors:
    """Checks a file of tensors against its records while it arrives, piece by piece."""

    def __init__(self, name: str, expected: Mapping[str, TensorRecord]) -> None:
        self._name = name
        self._expected = expected
        self._start = bytearray()
        """What has come, until the header is whole."""
        self._places: dict[str, _Place] | None = None
        """Of the tensors that are not whole yet, in the order of their bytes."""
        self._end = 0
        """Bytes that have been checked."""
        self._digest = xxhash.xxh3_64()

    def add(self, piece: bytes) -> None:
        """Raises: BadTensorFile, which names the first tensor that is not what it was when it was written."""
        if self._places is None:
            self._start += piece
            if len(self._start) < _ALIGNMENT or len(self._start) < (end := _header_end(self._name, self._start)):
                return
            self._end = end
            places = _read_places(self._name, bytes(self._start[:end]))
            if places.keys() != self._expected.keys():
                raise BadTensorFile(f"{self._name} and its records name different tensors")
            self._places = dict(sorted(places.items(), key=lambda named: (named[1].begin, named[1].end)))
            piece = bytes(self._start[end:])
        self._check(memoryview(piece), self._places)

    def _check(self, piece: memoryview, places: dict[str, _Place]) -> None:
        while places:
            name, place = next(iter(places.items()))
            part = piece[: max(0, place.end - self._end)]
            self._digest.update(part)
            piece, self._end = piece[len(part) :], self._end + len(part)
            if self._end < place.end:
                return
            if TensorRecord(place.shape, place.dtype, self._digest.hexdigest()) != self._expected[name]:
                raise BadTensorFile(f"tensor {name} does not match its checksum")
            del places[name]
            self._digest.reset()
        if piece:
            raise BadTensorFile(f"{self._name} has bytes after its last tensor")

    def finish(self) -> None:
        """Raises: BadTensorFile for a file that is not whole."""
        if self._places is None or self._places:
            raise BadTensorFile(f"{self._name} ends after {self._end} bytes, before its last tensor")


def _digest(content: memoryview, place: _Place) -> str:
    with content[place.begin : place.end] as part:
        return xxhash.xxh3_64_hexdigest(part)


def _layout(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, _Place]]:
    """The header with its length before it, and the places of the tensors behind it; wide elements first, so that all
    are aligned."""
    offsets: dict[str, Any] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        begin, end = end, end + tensors[name].numel() * tensors[name].element_size()
        shape, dtype = list(tensors[name].shape), _DTYPES[tensors[name].dtype]
        offsets[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **offsets}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    start = _ALIGNMENT + len(text)
    return len(text).to_bytes(_ALIGNMENT, "little") + text, _places(offsets, start)


def _header_end(name: str, content: bytearray | memoryview) -> int:
    """Bytes before the first tensor."""
    length = int.from_bytes(content[:_ALIGNMENT], "little")
    if length > _LONGEST_HEADER:
        raise BadTensorFile(f"{name} is incomplete: its header has {length} bytes")
    return _ALIGNMENT + length


def _read_places(name: str, header: bytes) -> dict[str, _Place]:
    """`header` is all before the first tensor."""
    start = len(header)
    try:
        places = _places(json.loads(header[_ALIGNMENT:]), start)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadTensorFile(f"{name} has no readable header ({error})") from error
    for tensor, place in places.items():
        if not start <= place.begin <= place.end:
            raise BadTensorFile(f"{name} is incomplete: tensor {tensor} is at bytes {place.begin} to {place.end}")
    return places


def _places(header: Mapping[str, Any], start: int) -> dict[str, _Place]:
    return {
        name: _Place(list(entry["shape"]), entry["dtype"], *(start + int(offset) for offset in entry["data_offsets"]))
        for name, entry in header.items()
        if name != "__metadata__"
    }
