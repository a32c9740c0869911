"""Entry points: the command line, the log on stderr, and one line for a failure.

Imports no large library, because `cusearch --help` waits for this import."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from cusearch_async.errors import CusearchError

_OVERRIDE = re.compile(r"--(steps|\w+\.[\w.-]+)(=|$)")


class Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse(self) -> tuple[argparse.Namespace, list[str]]:
        """Parse the command line: the command's own arguments, and the overrides of settings."""
        own, overrides = split_overrides(sys.argv[1:])
        arguments, unknown = self.parse_known_args(own)
        if unknown:
            from cusearch_async.config import explain_unknown  # noqa: PLC0415  (the settings take a while to load)

            self.error(explain_unknown(unknown))
        return arguments, overrides


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the command's own arguments, overrides). Overrides are `--section.key value`, `--section.key=value`, `--steps
    n`."""
    own: list[str] = []
    overrides: list[str] = []
    rest = list(arguments)
    while rest:
        flag = rest.pop(0)
        if not _OVERRIDE.match(flag):
            own.append(flag)
            continue
        overrides.append(flag)
        if "=" not in flag and rest and not rest[0].startswith("--"):
            overrides.append(rest.pop(0))
    return own, overrides


def log_to_stderr(name: str) -> None:
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name}: %(message)s", datefmt="%H:%M:%S", force=True)
    for noisy in ("httpx", "httpx2", "openai", "aiohttp.access", "vllm", "transformers", "DeepSpeed", "torch", "faiss"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # The Hub's library warns at each retry; we report the final failure. It sets its level when it is imported, which
    # may be later.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")


@contextmanager
def exit_with_one_line(name: str) -> Iterator[None]:
    """Wraps an entry point: a known error ends the process with one line and status 1.

    Known are the errors in `errors`, and system errors that name a file or folder. Anything else is a bug and keeps its
    traceback."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except (CusearchError, OSError, ExceptionGroup) as error:
        named = known_error_message(error)
        if named is None:
            raise
        sys.exit(f"{name}: {named}")


def known_error_message(error: BaseException) -> str | None:
    """The line for a known error, also from within an exception group; None for a bug."""
    if isinstance(error, CusearchError):
        return str(error)
    if isinstance(error, OSError) and isinstance(error.filename, str | bytes):
        return f"{os.fsdecode(error.filename)}: {error.strerror}; check the path, its permissions and the disk"
    if isinstance(error, BaseExceptionGroup):
        found = (known_error_message(inner) for inner in error.exceptions)
        return next((inner for inner in found if inner is not None), None)
    return None
