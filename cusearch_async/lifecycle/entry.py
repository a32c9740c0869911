"""Entry points: the command line, the log on stderr, and one line for a failure.

Imports no large library, because `cusearch --help` waits for this import."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import re
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from cusearch_async.errors import CusearchError
from cusearch_async.overrides import flags, settings_in
from cusearch_async.paths import at_home
from cusearch_async.surrogates import visible

_OVERRIDE = re.compile(r"--(steps|\w+\.[\w.-]+)(=|$)")
INTERRUPTED, NO_READER, STOPPED = 130, 141, 143
"""Exit statuses of shells: after ctrl-C (128 + SIGINT), after `| head` (128 + SIGPIPE), and after SIGTERM."""
_SIMILARITY = 0.7
"""Similarity from which a word counts as a misspelling of a choice."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Why a device takes no more."""


def own_modules_last() -> None:
    """Look for modules in the current folder last, not first as `python -m` does: a user's redis.py must not hide the
    package. Call it before any package is imported."""
    try:
        is_here = Path(sys.path[0]).absolute() == Path.cwd()
    except FileNotFoundError:  # somebody has deleted the current folder, so it holds no module
        return
    if is_here and not sys.flags.safe_path:
        sys.path.append(sys.path.pop(0))


class Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line, and expands ~ in paths."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register("type", Path, _path)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is not None and file is sys.stdout:
            file.write(message)  # argparse would hide that the device is full
        else:
            super()._print_message(message, file)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse an unknown choice with the one that is meant, or with all of them."""
        if action.choices is not None and value not in action.choices:
            from difflib import get_close_matches  # noqa: PLC0415  (only for this)

            choices = list(map(str, action.choices))
            near = get_close_matches(str(value), choices, n=1, cutoff=_SIMILARITY)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(choices)}"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}; {hint}")

    def parse(self) -> tuple[argparse.Namespace, list[str]]:
        """Parse the command line: the command's own arguments, and the overrides of settings."""
        own, overrides = split_overrides(sys.argv[1:])
        arguments, unknown = self.parse_known_args(own)
        if unknown:
            from cusearch_async.config import explain_unknown  # noqa: PLC0415  (the settings take a while to load)

            self.error(explain_unknown(unknown))
        for name, values in _given(overrides).items():
            if len(values) > 1:
                self.error(f"{name} is given {len(values)} times ({', '.join(values)}); give it once")
        return arguments, overrides


def _path(text: str) -> Path:
    try:
        return Path(at_home(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _given(overrides: Sequence[str]) -> dict[str, list[str]]:
    """Setting -> its values on the command line."""
    found: dict[str, list[str]] = {}
    for name, value in settings_in(overrides):
        found.setdefault("--run.steps" if name == "--steps" else name, []).append(value or "")
    return found


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the command's own arguments, overrides): `--section.key value`, `--section.key=value`, `--steps n`."""
    own: list[str] = []
    overrides: list[str] = []
    for words in flags(arguments):
        (overrides if _OVERRIDE.match(words[0]) else own).extend(words)
    return own, overrides


class _Plain(logging.Formatter):
    """One line a message: retrievers, programs and models write parts of them, and a terminal obeys what it reads."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (its name there)
        record.message = visible(record.message).replace("\n", "\\n")
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return visible(super().formatException(ei)).replace("\n", "\n  ")


def log_to_stderr(name: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_Plain(f"%(asctime)s {name}: %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for noisy in ("httpx", "httpx2", "openai", "aiohttp.access", "vllm", "transformers", "DeepSpeed", "torch", "faiss"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # The Hub's library warns at each retry; we report the final failure. It sets its level when it is imported, which a
    # command may have done already.
    level = os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    logging.getLogger("huggingface_hub").setLevel(logging.getLevelNamesMapping().get(level.upper(), logging.ERROR))


@contextmanager
def quick_to_interrupt() -> Iterator[None]:
    """While libraries are imported, ctrl-C ends the process at once: a library may turn the exception into another."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not ignored, as in the background of a script
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def exit_with_one_line(name: str) -> Iterator[None]:
    """Wraps an entry point: a known error ends the process with one line and status 1.

    It prints nothing when nobody reads the output, or after ctrl-C. Any other error keeps its traceback."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _has_no_reader():
            _give_up_output()
            sys.exit(NO_READER)
        named = known_error_message(error)
        if named is None and _is_interrupt(error):
            sys.exit(INTERRUPTED)
        if named is None:
            raise
        _give_up_output()
        sys.exit(f"{name}: {visible(named)}".replace("\n", "\n  "))


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether an error came of ctrl-C: libraries turn it into other errors while they are imported."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _has_no_reader() -> bool:
    """Whether stdout is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _give_up_output() -> None:
    """Print nothing more to a stdout that takes nothing: the interpreter would complain when it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except AttributeError:  # no stdout at all
        pass


def known_error_message(error: BaseException) -> str | None:
    """The line for a known error, also from within an exception group; None for a bug."""
    if isinstance(error, CusearchError):
        return str(error)
    if isinstance(error, OSError) and isinstance(error.filename, str | bytes):
        return f"{os.fsdecode(error.filename)}: {error.strerror}; check the path, its permissions and the disk"
    if isinstance(error, OSError) and error.errno in _FULL:  # of stdout, or of an open file
        return f"nothing more can be written: {error.strerror}; make room on the disk, or send the output elsewhere"
    if isinstance(error, BaseExceptionGroup):
        found = (known_error_message(inner) for inner in error.exceptions)
        return next((inner for inner in found if inner is not None), None)
    return None
