"""The optimizer's state in a checkpoint: of every parameter its float32 master and Adam's two moments.

Every rank writes its part, `rank0.safetensors` and so on: some elements of each flat parameter, in the order of ranks.
So nothing in a checkpoint depends on how ZeRO divides parameters, and any number of ranks reads it at any stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")
KINDS = (MASTER, *MOMENTS)
"""Of every parameter; the moments with torch's names."""
RANKS, UPDATES = "ranks", "updates"
"""Of every file: the number of files, and of updates that Adam has made."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One rank's part of a parameter: `length` elements from `start` on of the flat parameter, which are those from
    `offset` on of the float32 tensor `masters`."""

    start: int
    length: int
    masters: torch.Tensor
    offset: int

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """This part of the masters, or of moments with the same layout; not a copy."""
        return values.view(-1)[self.offset : self.offset + self.length]


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.safetensors"


class SavedState:
    """The state that the ranks of a learner saved in `folder`. `shapes` are those of the model's parameters.

    Raises: OSError for a file that is missing; SafetensorError for one of another form."""

    def __init__(self, folder: Path, shapes: Mapping[str, torch.Size]) -> None:
        self.shapes = shapes
        first: Any = safe_open(file_of(folder, 0), "pt")
        self.updates: torch.Tensor = first.get_tensor(UPDATES)
        self.ranks = int(first.get_tensor(RANKS))
        """1 for stage 0, whatever the number of ranks was: all of them had the same."""
        files: list[Any] = [first, *(safe_open(file_of(folder, rank), "pt") for rank in range(1, self.ranks))]
        self._files = [(file, frozenset(file.keys())) for file in files]

    def whole(self, name: str, kind: str) -> torch.Tensor:
        """One of KINDS of a parameter, float32, on the CPU."""
        shape = self.shapes[name]
        return self.elements(name, kind, 0, shape.numel()).view(shape)

    def elements(self, name: str, kind: str, start: int, length: int) -> torch.Tensor:
        """`length` elements from `start` on of one of KINDS of a parameter, flat; no other is read.

        Raises: ValueError for a parameter of another size."""
        key, found, end = f"{name}/{kind}", [], 0
        for file, held in self._files:
            if key in held:
                part = file.get_slice(key)
                begin, end = end, end + part.get_shape()[0]
                first, last = max(start, begin), min(start + length, end)
                if first < last:
                    found.append(part[first - begin : last - begin])
        if end != self.shapes[name].numel():
            raise ValueError(f"{name} has {self.shapes[name].numel()} elements, its {kind} {end}")
        return torch.cat(found)
