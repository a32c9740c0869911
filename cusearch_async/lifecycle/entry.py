"""Entry points: the command line, the log on stderr, and one line for a failure.

Imports nothing heavy: `cusearch --help` waits for it."""

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

_OVERRIDE = re.compile(r"--(steps|\w+\.[\w.]+)(=|$)")


class Parser(argparse.ArgumentParser):
    """Refuses in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse(self) -> tuple[argparse.Namespace, list[str]]:
        """The command line: a command's own arguments, and the settings that it overrides."""
        own, overrides = split_overrides(sys.argv[1:])
        arguments, unknown = self.parse_known_args(own)
        if unknown:
            from cusearch_async.config import explain_unknown  # noqa: PLC0415  (the settings take a while to load)

            self.error(explain_unknown(unknown))
        return arguments, overrides


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What belongs to the command, and the overrides: `--section.key value`, `--section.key=value`, `--steps n`."""
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
    for noisy in ("httpx", "aiohttp.access", "vllm", "transformers", "DeepSpeed", "torch", "faiss"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # Each of the Hub's retries is a warning; what fails in the end is said by us. Its library sets its level when it is
    # imported, which may come later.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")


@contextmanager
def exit_with_one_line(name: str) -> Iterator[None]:
    """Around all that an entry point does: a failure with a name ends the process with one line and status 1.

    Names are those of `errors`, and of a file or folder that the system refuses. Anything else is a bug of ours, and
    keeps its traceback."""
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
    """What to say of the error that ended a process, also from within the group of a TaskGroup; None for a bug."""
    if isinstance(error, CusearchError):
        return str(error)
    if isinstance(error, OSError) and isinstance(error.filename, str | bytes):
        return f"{os.fsdecode(error.filename)}: {error.strerror}; check the path, its permissions and the disk"
    if isinstance(error, BaseExceptionGroup):
        found = (known_error_message(inner) for inner in error.exceptions)
        return next((inner for inner in found if inner is not None), None)
    return None
