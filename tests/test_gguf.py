"""A GGUF file becomes a model folder, or is refused in one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from cusearch_async.errors import ConfigError
from cusearch_async.gguf import convert
from cusearch_async.machine import Memory

HIDDEN, INNER, ROWS = 16, 32, 64
LAYER = {
    **{f"attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")},
    **{"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)},
    **{"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)},
}
SHAPES: Mapping[str, tuple[int, ...]] = {
    **{"token_embd": (ROWS, HIDDEN), "output": (ROWS, HIDDEN), "output_norm": (HIDDEN,)},
    **{f"blk.0.{name}": shape for name, shape in LAYER.items()},
}


def llama(path: Path, without: str = "", more: Callable[[gguf.GGUFWriter], None] = lambda _: None) -> Path:
    """A file of one layer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(ROWS)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*"abcdefghijklmnopqrstuvwxyz", "ab", *(f"<{number}>" for number in range(ROWS - 27))])
    writer.add_token_types([1] * ROWS)
    writer.add_token_merges(["a b"])
    for name, shape in SHAPES.items():
        if name != without:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_model_becomes_a_folder(tmp_path: Path):
    count = convert(llama(tmp_path / "a.gguf"), tmp_path / "model")
    assert count == sum(int(np.prod(shape)) for shape in SHAPES.values())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").num_parameters() == count


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(4, np.float32)), r"rope_freqs\.weight"),
        (lambda writer: writer.add_tensor("rope_factors_long.weight", np.ones(4, np.float32)), "rope_factors_long"),
        (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN), r"llama\.rope\.scaling\.type"),
    ],
)
def test_scaled_positions_are_not_left_out_silently(tmp_path: Path, more, named):
    """transformers does not read them: Llama 3.2 became a model whose positions were others."""
    with pytest.raises(ConfigError, match=f"scales its positions .{named}.*take the model's own folder"):
        convert(llama(tmp_path / "a.gguf", more=more), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_positions_that_are_said_not_to_be_scaled_are_none(tmp_path: Path):
    more = lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)  # noqa: E731
    assert convert(llama(tmp_path / "a.gguf", more=more), tmp_path / "model")


@pytest.mark.parametrize("name", ["blk.0.ffn_up", "token_embd"])
def test_a_file_that_lacks_weights_is_refused(tmp_path: Path, name):
    """The first part of a split one: what was missing became random numbers."""
    with pytest.raises(ConfigError, match=r"a\.gguf lacks weights, like model\.\S+: they would be random"):
        convert(llama(tmp_path / "a.gguf", without=name), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_file_larger_than_the_memory_is_refused_before_it_is_loaded(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("cusearch_async.gguf.usable_memory", lambda: Memory(10_000, 0))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(ConfigError, match=r"a\.gguf has 0\.0 M parameters, 0\.0 GiB in float32; .* has 0\.0 GiB"):
        convert(llama(tmp_path / "a.gguf"), tmp_path / "model")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"PK\x03\x04 a wheel", r"is no GGUF file: it begins with b'PK\\x03\\x04'"),
        (b"GGUF", "cannot be converted: "),
        (b"GGUF" + bytes(60), "cannot be converted: "),
    ],
)
def test_what_is_no_model_is_refused_and_nothing_is_left(tmp_path: Path, content: bytes | None, problem: str):
    file = tmp_path / "a.gguf"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        convert(file, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ([] if content is None else ["a.gguf"])


def test_a_folder_that_exists_is_not_written_into(tmp_path: Path):
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match="model exists; choose another folder, or delete it"):
        convert(tmp_path / "a.gguf", tmp_path / "model")
