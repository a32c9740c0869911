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


def dtype_of(record: TensorRecord) -> torch.dtype:
    return next(dtype for dtype, name in _DTYPES.items() if name == record.dtype)


class BadTensorFile(ValueError):
    """Says what is wrong with a file."""


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
            places = _read_places(path.name, content)
            return {name: TensorRecord(p.shape, p.dtype, _digest(content, p)) for name, p in places.items()}


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


def _read_places(name: str, content: memoryview) -> dict[str, _Place]:
    length = int.from_bytes(content[:_ALIGNMENT], "little")
    start = _ALIGNMENT + length
    if length > _LONGEST_HEADER or start > len(content):
        raise BadTensorFile(f"{name} is torn: its header has {length} bytes, the file {len(content)}")
    try:
        places = _places(json.loads(bytes(content[_ALIGNMENT:start])), start)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadTensorFile(f"{name} has no readable header ({error})") from error
    for tensor, place in places.items():
        if not start <= place.begin <= place.end <= len(content):
            raise BadTensorFile(f"{name} is torn: tensor {tensor} ends at byte {place.end} of {len(content)}")
    return places


def _places(header: Mapping[str, Any], start: int) -> dict[str, _Place]:
    return {
        name: _Place(list(said["shape"]), said["dtype"], *(start + int(offset) for offset in said["data_offsets"]))
        for name, said in header.items()
        if name != "__metadata__"
    }
