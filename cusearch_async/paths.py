"""Paths as people write them."""

from __future__ import annotations

import os
import re
from pathlib import Path


def at_home(path: str) -> str:
    """The path, with a leading ~ or ~user replaced by that home folder, as a shell does.

    Raises: ValueError for a variable like $HOME, which a shell replaces and we do not, unless a folder is called
    so, and for the home of nobody."""
    variable = re.search(r"\$\{?[A-Za-z_]\w*\}?", path)
    if variable and not Path(path[: variable.end()]).exists():  # "$" may be in a real name
        raise ValueError(f"{path!r} holds {variable[0]}, which only a shell replaces; write the folder itself, or ~")
    found = os.path.expanduser(path)  # noqa: PTH111  (Path would drop a final slash, and "./" of "./model")
    if found.startswith("~"):
        raise ValueError(f"{path!r} begins with ~, but there is no such user; write the folder")
    return found
