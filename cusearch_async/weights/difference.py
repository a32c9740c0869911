"""What changed between two files of tensors with the same layout: their bytes' exclusive or, compressed with zstd.

Where a learning rate is small, few bits of bfloat16 weights change in a step. The difference loses nothing: with the
first file it gives the second, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import zstandard
from numpy.typing import NDArray

from cusearch_async.weights.tensor_file import ArrivingTensors, BadTensorFile

LEVEL = 1
"""Higher ones are slower and no smaller here."""
_PIECE_BYTES = 16 << 20


def write_difference(base: Path, target: Path, into: BinaryIO, threads: int) -> None:
    """Of files of equal sizes. Raises: OSError."""
    old, new = _mapped(base), _mapped(target)
    compressor = zstandard.ZstdCompressor(level=LEVEL, threads=threads).compressobj(len(new))
    for place in _places(len(new)):
        into.write(compressor.compress((old[place] ^ new[place]).data))
    into.write(compressor.flush())


def restore(base: Path, difference: Path, into: BinaryIO, tensors: ArrivingTensors) -> None:
    """Write the second file, checked against the records of its `tensors`.

    Raises: BadTensorFile, before a damaged piece is written; OSError."""
    old = _mapped(base)
    with difference.open("rb") as packed, zstandard.ZstdDecompressor().stream_reader(packed) as reader:
        for place in _places(len(old)):
            try:
                piece = reader.read(place.stop - place.start)
            except zstandard.ZstdError as error:
                raise BadTensorFile(f"the difference is damaged: {error}") from error
            if len(piece) < place.stop - place.start:
                raise BadTensorFile("the difference is incomplete")
            restored = (old[place] ^ np.frombuffer(piece, np.uint8)).tobytes()
            tensors.add(restored)
            into.write(restored)
    tensors.finish()


def _mapped(file: Path) -> NDArray[np.uint8]:
    """Raises: BadTensorFile."""
    if not file.stat().st_size:  # what a crash of the machine leaves of a file that was not synced
        raise BadTensorFile(f"{file} is empty")
    return np.memmap(file, np.uint8, mode="r")


def _places(size: int) -> Iterator[slice]:
    for begin in range(0, size, _PIECE_BYTES):
        yield slice(begin, min(begin + _PIECE_BYTES, size))
