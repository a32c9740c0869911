"""Models that a retriever uses: loaded from the Hub or a folder, checked, and on their device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoTokenizer

from cusearch_async.errors import ConfigError, first_line
from cusearch_async.lifecycle.placement import require_device


def load(
    auto: Any, name: str | None, device: str, setting: str, part: Callable[[Any], Any] = lambda model: model
) -> tuple[Any, Any, list[str]]:
    """Tokenizer, model, and the weights that it needs and that are not in `name`. Float16 on a GPU, float32 on a CPU.

    `auto` is the transformers class that loads it, `part` what of the model is wanted, `setting` what the config calls
    `name`. Raises: ConfigError when it cannot be loaded, or has no tokenizer."""
    require_device("retriever.dense.device", device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model, report = auto.from_pretrained(
            name,
            dtype=torch.float16 if device.startswith("cuda") else torch.float32,
            output_loading_info=True,
            trust_remote_code=False,  # None would ask on the terminal
        )
        model = part(model).to(device).eval()
    except Exception as error:  # what transformers and torch raise here has no common type
        problem = f"cannot be loaded on {device!r}: {first_line(error)}; use a Hugging Face id or a local folder"
        raise ConfigError(f"{setting} {name!r} {problem}") from error
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):  # transformers makes one up where there are no files
        raise ConfigError(f"{setting} {name!r} has no tokenizer files; put tokenizer.json next to it")
    return tokenizer, model, sorted(report["missing_keys"])
