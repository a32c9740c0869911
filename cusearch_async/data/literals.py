"""Lists and objects that a file holds as text: JSON, Python's repr, or numpy's, as pandas writes them into CSV."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

_ENDS = ("[]", "{}", "()")
_QUOTED = re.compile(r"""(["'])\s*\[.*\]\s*\1""", re.DOTALL)
"""A list that was written as text twice."""
_STRING = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")(\s*(?=['"]))?""", re.DOTALL)
"""A string literal, and whether another follows it without a comma: Python would join the two into one."""
_NAMES = {"nan": None, "null": None, "true": True, "false": False}


def read_literal(value: Any) -> Any:
    """The list or object that a text is; any other value, and a text that is none, as it is.

    "['a', 'b']", '["a", "b"]', "['a' 'b']" and "array(['a', 'b'], dtype=object)" -> ["a", "b"]; "(500)" and "('a')"
    stay text."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if _QUOTED.fullmatch(text):
        inner = _parsed(text)
        listed = read_literal(inner)
        return value if listed is inner else listed
    if text[:1] + text[-1:] not in _ENDS and not text.startswith("array(["):
        return value
    found = _parsed(text)
    is_meant = text[0] != "(" or (isinstance(found, list) and all(isinstance(item, str) for item in found))
    return found if is_meant else value


def _parsed(text: str) -> Any:
    """The value of a literal; the text itself where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    with_commas = _STRING.sub(lambda found: found[1] + ("" if found[2] is None else ", "), text)
    try:
        return _value(ast.parse(with_commas, mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text


def looks_like_a_list(text: str) -> bool:
    """Whether a text that `read_literal` leaves alone was meant as a list or an object."""
    text = text.strip()
    return text[:1] + text[-1:] in ("[]", "{}")


def _value(node: ast.expr) -> Any:
    """Raises: ValueError for what is no literal."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {str(ast.literal_eval(key or "")): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.Call(func=ast.Name(id="array"), args=[content]):
            return _value(content)
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case _:
            raise ValueError(f"{ast.dump(node):.80} is no literal")
