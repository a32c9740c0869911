"""The base classes of all sections of the config."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from datetime import date, time
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qs, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)
from pydantic_core import PydanticCustomError

from cusearch_async.errors import ConfigError
from cusearch_async.extensions import Names, Settings, as_list
from cusearch_async.paths import at_home

PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9_.-]*$": "must be letters, digits, '_', '.' and '-', the first a letter or digit",
    r"^(cpu|cuda(:\d+)?)$": "must be 'cpu', 'cuda' or 'cuda:N'",
    r"^[A-Za-z0-9][A-Za-z0-9_-]*$": "must be letters, digits, '_' and '-', the first a letter or digit",
}
"""Pattern of a setting -> the same rule in words."""
NAME, DEVICE, LABEL = PATTERNS

Dtype = Literal["float32", "bfloat16"]


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The one of `known` that a misspelled `name` may mean; empty when none is similar."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), "")


class Scope(Enum):
    """Who has to agree on a setting: it stands in the setting's annotation, and is MEANING where none does."""

    SHARED = "shared"
    """In the run contract: all processes of a run must have the same value, and a resume as for MEANING."""
    MEANING = "meaning"
    """It changes what is learned: a resume with another value needs --accept-changes. It is not in the contract."""
    FREE = "free"
    """Where, how fast and how long the run works: it may differ between processes, and change at any start."""


_T = TypeVar("_T")
Shared = Annotated[_T, Scope.SHARED]
Free = Annotated[_T, Scope.FREE]


def _as_numbers(value: Any) -> Any:
    parts = as_list(value)
    if isinstance(value, str) and not all(re.fullmatch(r"-?\d+", part) for part in parts):  # pydantic has 0-3 as -3
        raise ValueError(f"must be a list of integers, like [0, 1] or 0,1, got {value!r}")
    return parts


def _at_home(value: Any) -> Any:
    if value == "":
        raise ValueError("must name a folder or a file, got ''; write . for the current folder")
    return at_home(str(value)) if isinstance(value, str | Path) else value


_Number = Annotated[int, Field(ge=0)]
Numbers = Annotated[
    tuple[_Number, ...], BeforeValidator(_as_numbers, json_schema_input_type=_Number | str | tuple[_Number, ...])
]
"""A list of cores or devices; see `as_list`."""
Sources = Annotated[Names, AfterValidator(lambda names: tuple(map(at_home, names)))]
"""A list of files, or names of what comes with the package or from the Hub."""
Folder = Annotated[Path, BeforeValidator(_at_home)]
"""A path; see `paths.at_home`."""
Location = Annotated[str, AfterValidator(at_home)]
"""A path, or the name of something on the Hub."""


class Section(Settings):
    model_config = ConfigDict(extra="forbid", validate_default=True, coerce_numbers_to_str=True, allow_inf_nan=False)


def refuse_dates(value: Any) -> Any:
    """The value. A saved config has dates as texts, so that the code they are for would be given one or the other.
    Raises: ValueError."""
    if isinstance(value, date | time):
        raise ValueError(f"must not hold a date or a time, got {value}; write it as a text")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        refuse_dates(inner)
    return value


_SECRET = re.compile(r"(?:.*[_-])?(?:pass(?:word|wd)?|token|secret|auth|api_?key|key)", re.IGNORECASE)
"""Names of a URL's query; `ssl_keyfile` and `max_tokens` are none."""
_WITHOUT = "the service must take requests without one"


def refuse_secrets(url: str, remedy: str, *, takes_user: bool = False) -> None:
    """Settings are written to files and logs, so the ValueError for a password or a key in a URL does not repeat it.
    `remedy`: where it belongs."""
    login, at, _ = (url.partition("//")[2] or url).rpartition("@")
    asked = parse_qs(url.partition("?")[2], keep_blank_values=True)
    if (at and (not takes_user or ":" in login)) or any(_SECRET.fullmatch(name) for name in asked):
        raise ValueError(f"url must not hold a password; {remedy}")


def check_address(url: str, schemes: tuple[str, ...], example: str) -> None:
    """Raises: ValueError with the address and an example."""
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        raise ValueError(f"url {url!r} must look like {example}")


def asked_url(example: str, remedy: str = _WITHOUT) -> AfterValidator:
    """Of a setting with the whole URL of requests, which may have a query; checks it."""

    def checked(url: str) -> str:
        url = url.strip()
        refuse_secrets(url, remedy)
        check_address(url, ("http", "https"), example)
        return url

    return AfterValidator(checked)


def service_url(
    example: str, endpoint: str = "", remedy: str = _WITHOUT, schemes: tuple[str, ...] = ("http", "https")
) -> AfterValidator:
    """Of a setting whose URL we put paths behind: drops a slash at its end, and the endpoint that we add; checks the
    rest."""

    def checked(url: str) -> str:
        url = url.strip().rstrip("/").removesuffix(endpoint).rstrip("/")
        refuse_secrets(url, remedy)
        check_address(url, schemes, example)
        if "?" in url or "#" in url:
            raise ValueError(f"url {url!r} must end with its path, like {example}: what follows a ? or # is not sent")
        return url

    return AfterValidator(checked)


ObjectsUrl = Annotated[str, service_url("s3://bucket/prefix", schemes=("s3", "gs", "az"))]


class Extensible(Section):
    """A section that names a method or an environment. Its own settings are in the same section as the shared ones."""

    model_config = ConfigDict(extra="allow")  # settings of the user's own classes; `own` checks them

    @property
    def own_kind(self) -> type[BaseModel]:
        """The settings class of the named method or environment. Raises: ConfigError for an unknown name."""
        raise NotImplementedError

    @cached_property
    def own(self) -> Any:
        """The own settings. Raises: PydanticCustomError for wrong values and unknown keys."""
        kind = self.own_kind
        self._refuse_taken_names(kind)
        extra = self.model_extra or {}
        for name in extra:
            if name not in kind.model_fields:
                raise PydanticCustomError("unknown_own_setting", "unknown key", {"key": name})
        given = {n: extra.get(n, getattr(self, n, None)) for n in kind.model_fields if n in self.model_fields_set}
        try:
            read = partial(kind.model_validate, by_alias=False, by_name=True)
            found = read({name: refuse_dates(value) for name, value in given.items()})
            again = read(_dumped(found, "json", exclude_none=True))
        except ValidationError as error:
            raise PydanticCustomError("own_settings", "wrong settings", {"problems": error.errors()}) from error
        for name in kind.model_fields:
            value, saved = getattr(found, name), getattr(again, name)
            if value != saved and (value == value or saved == saved):  # noqa: PLR0124  (NaN is the same NaN)
                lost = f"is {value!r:.100}, and would be {saved!r:.100} in a saved config"
                raise ConfigError(f"{kind.__module__}:{kind.__qualname__}.{name} {lost}; give it a type that TOML has")
        return found

    def _refuse_taken_names(self, kind: type[BaseModel]) -> None:
        """Raises: ConfigError for an own setting with the name of a shared one, or of a member of this class."""
        own = type(self)
        for name in kind.model_fields.keys() - self.registered():
            if name in own.model_fields or hasattr(own, name):
                raise ConfigError(f"{kind.__qualname__} must not have a setting {name!r}: the config uses this name")

    @model_serializer(mode="wrap")
    def _with_own(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """Leave out the own settings of all other methods or environments."""
        own = _dumped(self.own, info.mode, bool(info.exclude_none), bool(info.exclude_defaults))
        shared = {name: value for name, value in handler(self).items() if name not in self.registered()}
        return shared | own

    @classmethod
    def registered(cls) -> set[str]:
        """Names of the own settings of all classes that come with the package."""
        own = [base for base in cls.__mro__ if issubclass(base, BaseModel) and not issubclass(base, Section)]
        return {name for base in own for name in base.model_fields}


def _dumped(own: BaseModel, mode: str, exclude_none: bool, exclude_defaults: bool = False) -> dict[str, Any]:
    """Own settings as a saved config and the run contract have them."""
    found: dict[str, Any] = own.model_dump(mode=mode, exclude_none=exclude_none, exclude_defaults=exclude_defaults)
    for name, field in type(own).model_fields.items():
        value = getattr(own, name)
        if exclude_none and value is None and field.get_default() is not None:
            found[name] = "none"  # read back without the key it would have its default
        if isinstance(value, set | frozenset) and name in found and mode == "json":
            found[name] = sorted(found[name], key=repr)  # else another order in each process
    return found
