"""What ranks saved in parts is whole again, and is read in other parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from cusearch_async.learner.divided_state import RANKS, UPDATES, Part, SavedState, file_of

NAME, KIND = "model.weight", "exp_avg"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return tmp_path_factory.mktemp("saved")


def save(folder, values: torch.Tensor, cuts: list[int]) -> None:
    """`values` of a flat parameter by as many ranks as there are parts; those of no element hold nothing."""
    bounds = [0, *sorted(cuts), len(values)]
    for rank in range(len(bounds) - 1):
        part = values[bounds[rank] : bounds[rank + 1]].clone()
        held = {f"{NAME}/{KIND}": part} if len(part) else {}
        common = {RANKS: torch.tensor(len(bounds) - 1), UPDATES: torch.tensor(3.0)}
        save_file({**held, **common}, file_of(folder, rank))


@given(data=st.data(), length=st.integers(1, 40))
def test_every_element_is_read_from_the_rank_that_has_it(folder, data, length):
    values = torch.arange(float(length))
    save(folder, values, data.draw(st.lists(st.integers(0, length), max_size=12)))
    saved = SavedState(folder, {NAME: torch.Size([length, 1])})
    assert torch.equal(saved.whole(NAME, KIND), values.view(length, 1))
    start = data.draw(st.integers(0, length - 1))
    count = data.draw(st.integers(1, length - start))
    assert torch.equal(saved.elements(NAME, KIND, start, count), values[start : start + count])
    assert float(saved.updates) == 3


def test_a_parameter_of_another_size_is_noticed(folder):
    save(folder, torch.arange(9.0), [4])
    for length in (8, 10):
        with pytest.raises(ValueError, match=rf"{NAME} has {length} elements, its {KIND} 9"):
            SavedState(folder, {NAME: torch.Size([length])}).elements(NAME, KIND, 0, 4)


def test_a_file_that_is_missing_is_noticed(tmp_path):
    save(tmp_path, torch.arange(9.0), [4])
    file_of(tmp_path, 1).unlink()
    with pytest.raises(FileNotFoundError):
        SavedState(tmp_path, {NAME: torch.Size([9])})


def test_a_part_is_a_view_of_the_rank_s_masters():
    masters = torch.zeros(10)
    part = Part(start=3, length=2, masters=masters, offset=4)
    part.of(masters).fill_(1)
    assert masters.tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0]
