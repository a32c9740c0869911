"""A GGUF file of a model (llama.cpp's format) as a Hugging Face folder, its quantised weights as numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from cusearch_async.errors import ConfigError, first_line, packages_of
from cusearch_async.files import put_in_place, writing
from cusearch_async.machine import usable_memory

FLOAT32 = 4
GIB = 1 << 30
SCALED = ("rope_freqs.", "rope_factors_")
"""How tensors of scaled positions begin (Llama 3.1, LongRoPE)."""


def convert(file: Path, folder: Path) -> int:
    """Write the model of `file` into `folder`, in float32; returns its parameters. Takes transformers' word for which
    architectures it knows.

    Raises: ConfigError for a file that transformers cannot read, or not all of, or that is larger than the memory, and
    a folder that exists."""
    if folder.exists():
        raise ConfigError(f"{folder} exists; choose another folder, or delete it")
    try:
        with file.open("rb") as opened:
            magic = opened.read(4)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    if magic != b"GGUF":
        raise ConfigError(f"{file} is no GGUF file: it begins with {magic!r}")
    with packages_of("gguf"):
        import gguf  # noqa: PLC0415  (transformers reads the file with it, too)
    import torch  # noqa: PLC0415  (takes seconds to import)
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    with _named(file):
        read = gguf.GGUFReader(file)
        kinds = {name: field.contents() for name, field in read.fields.items() if name.endswith(".rope.scaling.type")}
    refuse_scaled(file, [tensor.name for tensor in read.tensors], kinds)
    refuse_too_large(file, sum(int(tensor.n_elements) for tensor in read.tensors))
    with _named(file):
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        model, report = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=torch.float32, output_loading_info=True
        )
    if report["missing_keys"]:
        name = min(report["missing_keys"])
        raise ConfigError(f"{file} lacks weights, like {name}: they would be random; give a file that is not split")
    # the weights are plain numbers now; with these, transformers refuses to save them
    for name in ("hf_quantizer", "quantization_method"):
        if hasattr(model, name):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    with writing(folder) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
    put_in_place(folder)
    return sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """Errors become a ConfigError that names the file."""
    try:
        yield
    except Exception as error:  # the reader of a damaged file may raise anything
        raise ConfigError(f"{file} cannot be converted: {type(error).__name__}: {first_line(error)}") from error


def refuse_scaled(file: Path, tensors: Sequence[str], kinds: Mapping[str, str]) -> None:
    """Raises: ConfigError where positions are scaled: transformers does not read it, and the model would be another."""
    scaled = [name for name in tensors if name.startswith(SCALED)]
    scaled += [name for name, kind in kinds.items() if kind != "none"]
    if scaled:
        raise ConfigError(f"{file} scales its positions ({scaled[0]}), which is not read; take the model's own folder")


def refuse_too_large(file: Path, parameters: int) -> None:
    """Raises: ConfigError."""
    needed, here = FLOAT32 * parameters, usable_memory().total
    if needed > here:
        raise ConfigError(
            f"{file} has {parameters / 1e6:.1f} M parameters, {needed / GIB:.1f} GiB in float32; this machine has "
            f"{here / GIB:.1f} GiB"
        )
