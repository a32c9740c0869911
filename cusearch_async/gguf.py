"""A GGUF file of a model (llama.cpp's format) as a Hugging Face folder, its quantised weights as numbers."""

from __future__ import annotations

from pathlib import Path

from cusearch_async.errors import ConfigError, first_line, packages_of
from cusearch_async.files import put_in_place, writing


def convert(file: Path, folder: Path) -> int:
    """Write the model of `file` into `folder`, in float32; returns its parameters. Takes transformers' word for which
    architectures it knows.

    Raises: ConfigError for a file that it cannot read, and a folder that exists."""
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
        import gguf  # noqa: F401, PLC0415  (transformers reads the file with it)
    import torch  # noqa: PLC0415  (takes seconds to import)
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    except Exception as error:  # the reader of a damaged file may raise anything
        raise ConfigError(f"{file} cannot be converted: {type(error).__name__}: {first_line(error)}") from error
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
