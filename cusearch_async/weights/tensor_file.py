"""Writes and checks files of tensors in the safetensors format, through a mapping of the file.

Tensors are copied once, into pages that were allocated before: `safetensors.torch.save_file` takes many times as long.
Checksums are taken from the mapping, without a copy, and without Python's lock.
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
    """A tensor as it was written."""

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

    Raises: OSError; BadTensorFile for anything but a complete file of tensors."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < _ALIGNMENT:
            raise BadTensorFile(f"{path.name} has {size} bytes")
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as content:
            start = _ALIGNMENT + int.from_bytes(content[:_ALIGNMENT], "little")
            if start > min(size, _LONGEST_HEADER):
                raise BadTensorFile(f"{path.name} is incomplete: its header ends at byte {start} of {size}")
            places = _read_places(path.name, bytes(content[:start]))
            end = start
            for name, place in places.items():
                if not start <= place.begin <= place.end <= size:
                    where = f"tensor {name} is at bytes {place.begin} to {place.end} of {size}"
                    raise BadTensorFile(f"{path.name} is incomplete: {where}")
                end = max(end, place.end)
            if end < size:
                raise BadTensorFile(f"{path.name} has bytes after its last tensor")
            return {name: TensorRecord(p.shape, p.dtype, _digest(content, p)) for name, p in places.items()}


def _digest(content: memoryview, place: _Place) -> str:
    with content[place.begin : place.end] as part:
        return xxhash.xxh3_64_hexdigest(part)


def _layout(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, _Place]]:
    """The header with its length before it, and the places of the tensors after it; wide elements first, so that all
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


def _read_places(name: str, header: bytes) -> dict[str, _Place]:
    """`header` is all before the first tensor."""
    try:
        return _places(json.loads(header[_ALIGNMENT:]), len(header))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadTensorFile(f"{name} has no readable header ({error})") from error


def _places(header: Mapping[str, Any], start: int) -> dict[str, _Place]:
    return {
        name: _Place(list(entry["shape"]), entry["dtype"], *(start + int(offset) for offset in entry["data_offsets"]))
        for name, entry in header.items()
        if name != "__metadata__"
    }
