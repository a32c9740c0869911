"""The grammar of settings on a command line: `--section.key value`, `--section.key=value`, `--steps n`."""

from collections.abc import Iterator, Sequence


def flags(words: Sequence[str]) -> Iterator[list[str]]:
    """Each word, with the next one where that may be its value."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        takes = "=" not in word and rest and not rest[0].startswith("--")
        yield [word, rest.pop(0)] if takes else [word]


def settings_in(overrides: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """("--learner.lr", "1e-6"); a value of None is missing."""
    for flag, *after in flags(overrides):
        name, equals, value = flag.partition("=")
        yield name, value if equals else after[0] if after else None
