"""How DeepSpeed divides the optimizer's state among ranks, and what it saved of it, parameter by parameter.

A checkpoint holds for every parameter its float32 master and Adam's two moments. ZeRO 1 and 2 lay all parameters end
to end and cut that into as many equal parts as there are ranks; ZeRO 3 cuts each parameter into equal parts, and lays
the parts of a rank end to end, in one or more groups; stage 0 divides nothing. So a checkpoint can be read by another
number of ranks, and at another stage, than it was written by.

DeepSpeed's own way, `ds_to_universal`, writes the checkpoint a second time, in an extra step, and unpickles it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")
KINDS = (MASTER, *MOMENTS)
"""What there is of every parameter; the moments with torch's names."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a parameter that one rank holds: `length` elements from `start` on of the flat parameter, which are
    those from `offset` on of the rank's flat `group`."""

    start: int
    length: int
    group: int
    offset: int


def pieces(lengths: Sequence[int], stage: int, rank: int, ranks: int, groups: Sequence[int]) -> list[Piece]:
    """What `rank` of `ranks` holds of parameters with so many elements; its flat groups have `groups` elements, padding
    included. A piece may be empty.

    Raises: ValueError when the parameters do not fill the groups."""
    return (_cut_each if stage == 3 else _cut_all)(lengths, rank, ranks, groups)


def _cut_all(lengths: Sequence[int], rank: int, ranks: int, groups: Sequence[int]) -> list[Piece]:
    """ZeRO 1 and 2."""
    (share,) = groups
    padding = share * ranks - sum(lengths)
    if not 0 <= padding < 2 * ranks * max(1, len(lengths)):
        raise ValueError(f"{ranks} times {share} elements are not {sum(lengths)}")
    found = []
    for end, length in zip(itertools.accumulate(lengths), lengths, strict=True):
        begin = end - length
        first, last = max(begin, rank * share), min(end, (rank + 1) * share)
        found.append(Piece(max(0, first - begin), max(0, last - first), 0, max(0, first - rank * share)))
    return found


def _cut_each(lengths: Sequence[int], rank: int, ranks: int, groups: Sequence[int]) -> list[Piece]:
    """ZeRO 3: no parameter's part is divided among groups."""
    found, group, offset = [], 0, 0
    for length in lengths:
        share = -(-length // ranks)
        if group < len(groups) and offset + share > groups[group]:
            group, offset = group + 1, 0
        if group >= len(groups) or offset + share > groups[group]:
            raise ValueError(f"groups of {list(groups)} elements are too small for parameters of {list(lengths)}")
        start = min(rank * share, length)
        found.append(Piece(start, min(share, length - start), group, offset))
        offset += share
    return found


class SavedState:
    """What the ranks of a learner saved in `folder`; `load(path)` reads a file of it without unpickling. `shapes` are
    those of the model's parameters, in their order."""

    def __init__(self, folder: Path, load: Callable[[Path], Any], shapes: Mapping[str, torch.Size]) -> None:
        self.shapes = shapes
        self._folder, self._load = folder, load
        self._index = {name: number for number, name in enumerate(shapes)}

    @cached_property
    def ranks(self) -> int:
        """1 for stage 0, whatever the number of ranks was: all of them had the same."""
        return len(self._files) or 1

    @cached_property
    def stage(self) -> int:
        return int(self._of_ranks[0]["zero_stage"].value) if self._files else 0

    @cached_property
    def updates(self) -> torch.Tensor:
        """How many updates Adam has made."""
        if self.stage == 0:
            return torch.as_tensor(self._whole_adam["state"][0]["step"])
        return torch.as_tensor(self._adam(0)["state"][0]["step"])

    def whole(self, name: str, kind: str) -> torch.Tensor:
        """One of KINDS of a parameter, float32, on the CPU."""
        number = self._index[name]
        if self.stage == 0:
            whole: torch.Tensor = (
                self._whole_master(name) if kind == MASTER else self._whole_adam["state"][number][kind]
            )
            return whole
        flat = [
            self._group(rank, piece.group, kind)[piece.offset : piece.offset + piece.length]
            for rank, piece in enumerate(of_rank[number] for of_rank in self._pieces)
            if piece.length
        ]
        return torch.cat(flat).view(self.shapes[name])

    # --- stages 1 to 3: a file per rank ---------------------------------------------------------------

    @cached_property
    def _files(self) -> list[Path]:
        found = self._folder.glob("*zero_pp_rank_*_optim_states.pt")
        return sorted(found, key=lambda path: int(path.name.partition("rank_")[2].partition("_")[0]))

    @cached_property
    def _of_ranks(self) -> list[Any]:
        return [self._load(path)["optimizer_state_dict"] for path in self._files]

    def _adam(self, rank: int) -> Any:
        return self._of_ranks[rank]["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"]

    def _group(self, rank: int, group: int, kind: str) -> Any:
        if kind != MASTER:
            return self._adam(rank)["state"][group][kind]
        return self._of_ranks[rank]["fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"][group]

    @cached_property
    def _pieces(self) -> list[list[Piece]]:
        """Of every rank; the moments, not the masters, are saved with their padding."""
        lengths = [shape.numel() for shape in self.shapes.values()]
        return [
            pieces(
                lengths,
                self.stage,
                rank,
                self.ranks,
                [self._group(rank, group, MOMENTS[0]).numel() for group in range(len(self._adam(rank)["state"]))],
            )
            for rank in range(self.ranks)
        ]

    # --- stage 0: one file ----------------------------------------------------------------------------

    @cached_property
    def _one(self) -> Any:
        return self._load(self._folder / "mp_rank_00_model_states.pt")

    @cached_property
    def _whole_adam(self) -> Any:
        optimizer = self._one["optimizer"]
        return optimizer.get("optimizer_state_dict", optimizer)  # bfloat16 has masters beside Adam

    def _whole_master(self, name: str) -> Any:
        masters = self._one["optimizer"].get("fp32_groups")
        return masters[0][self._index[name]] if masters else self._one["module"][name]
