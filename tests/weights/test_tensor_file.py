"""Files of tensors: what safetensors reads, and nothing incomplete."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from cusearch_async.weights import tensor_file
from cusearch_async.weights.tensor_file import ArrivingTensors, BadTensorFile, TensorRecord, records_of, write_tensors

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8)


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES)),
        max_size=6,
    )
)
def test_safetensors_reads_what_is_written_and_the_other_way_round(tmp_path_factory, forms):
    folder = tmp_path_factory.mktemp("files")
    tensors = {
        name: torch.randint(0, 200, shape, generator=torch.Generator().manual_seed(i)).to(dtype)
        for i, (name, (shape, dtype)) in enumerate(forms.items())
    }
    write_tensors(folder / "ours", tensors)
    read = load_file(folder / "ours")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) and read[name].dtype == tensors[name].dtype for name in tensors)
    places = tensor_file._layout(tensors)[1]
    assert all(place.begin % tensors[name].element_size() == 0 for name, place in places.items()), "they are aligned"
    save_file(tensors, folder / "theirs", metadata={"format": "pt"})
    assert records_of(folder / "theirs") == records_of(folder / "ours")


def test_a_tensor_that_is_not_contiguous_or_wants_a_gradient_is_written_as_it_is(tmp_path):
    matrix = torch.arange(6.0).reshape(2, 3)
    write_tensors(tmp_path / "f", {"t": matrix.t(), "g": torch.nn.Parameter(matrix), "s": torch.tensor(3.0)})
    read = load_file(tmp_path / "f")
    assert (read["t"].tolist(), read["g"].tolist(), read["s"].item()) == (matrix.t().tolist(), matrix.tolist(), 3.0)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: b"", "has 0 bytes"),
        (lambda content: content[:4], "has 4 bytes"),
        (lambda content: content[:40], "is incomplete: its header"),
        (lambda content: content[:-1], "is incomplete: tensor b ends at byte"),
        (lambda content: b"\xff" * 8 + content[8:], "is incomplete: its header"),
        (lambda content: content[:8] + b"x" * (len(content) - 8), "no readable header"),
        (lambda content: content.replace(b'"shape"', b'"shApe"'), "no readable header"),
        (lambda content: (2).to_bytes(8, "little") + b"[]", "no readable header"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(tmp_path, damage, message):
    write_tensors(tmp_path / "f", {"a": torch.ones(3, dtype=torch.float64), "b": torch.ones(3)})
    (tmp_path / "f").write_bytes(damage((tmp_path / "f").read_bytes()))
    with pytest.raises(BadTensorFile, match=f"^f .*{message}"):
        records_of(tmp_path / "f")


def test_offsets_that_run_backwards_or_into_the_header_are_refused(tmp_path):
    for offsets in ([4, 0], [-8, 4], [0, 1 << 40]):
        header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode()
        (tmp_path / "f").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
        with pytest.raises(BadTensorFile, match="is incomplete: tensor a"):
            records_of(tmp_path / "f")


def test_checksums_let_other_threads_run(tmp_path):
    """A worker verifies weights while its event loop serves episodes."""
    write_tensors(tmp_path / "f", {"a": torch.zeros(1 << 26)})
    gaps, is_over = [], threading.Event()

    def tick():
        last = time.perf_counter()
        while not is_over.is_set():
            time.sleep(0.0005)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.perf_counter()
    for _ in range(5):
        records_of(tmp_path / "f")
    took = time.perf_counter() - began
    is_over.set()
    thread.join()
    assert len(gaps) > 10, f"{len(gaps)} turns in {took:.3f} s"


def arrive(content: bytes, records: dict[str, TensorRecord], cuts: list[int]) -> None:
    """In pieces that end at `cuts`."""
    arriving, at = ArrivingTensors("f", records), 0
    for cut in [*sorted(cut % (len(content) + 1) for cut in cuts), len(content)]:
        arriving.add(content[at:cut])
        at = cut
    arriving.finish()


@given(st.lists(st.integers(0, 10**6), max_size=8), st.integers(0, 10**6), st.integers(1, 255))
def test_what_arrives_in_pieces_is_taken_whole_and_in_no_other_way(tmp_path_factory, cuts, at, bits):
    path = tmp_path_factory.mktemp("files") / "f"
    write_tensors(path, {"a": torch.arange(5.0), "none": torch.empty(0), "b": torch.ones(3, dtype=torch.bfloat16)})
    content, records = path.read_bytes(), records_of(path)
    arrive(content, records, cuts)
    changed = bytearray(content)
    changed[-1 - at % 26] ^= bits  # of the tensors
    for damaged in (bytes(changed), content[: at % len(content)], content + b"x"):
        with pytest.raises(BadTensorFile):
            arrive(damaged, records, cuts)


def test_what_arrives_with_other_tensors_than_its_records_is_refused(tmp_path):
    write_tensors(tmp_path / "f", {"a": torch.ones(2)})
    for other in ({"b": torch.ones(2)}, {"a": torch.ones(2, 1)}, {"a": torch.ones(2).int()}):
        write_tensors(tmp_path / "other", other)
        with pytest.raises(BadTensorFile, match=r"name different tensors|does not match its checksum"):
            arrive((tmp_path / "f").read_bytes(), records_of(tmp_path / "other"), [])
