"""The keys that `Settings` declares, one by one: what file, environment, flags, error messages and documentation share.

Invariant: derived from the model alone; a key that is added there appears everywhere. It holds no values.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from distaff.settings import Settings

PREFIX = "DISTAFF_"
Kind = Literal["bool", "list", "dict", "scalar"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One setting."""

    path: str
    """As in the file: "engine.base_urls"."""
    annotation: Any
    metadata: tuple[Any, ...]
    default: Any
    """None where the default depends on other keys."""
    description: str

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def flag(self) -> str:
        return "--" + self.path.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.path.replace(".", "__").upper()

    @property
    def optional(self) -> bool:
        """None is a value of it."""
        return type(None) in get_args(self.annotation)

    @property
    def kind(self) -> Kind:
        origin = get_origin(self.annotation) or self.annotation
        if origin is bool:
            return "bool"
        return "list" if origin is list else "dict" if origin is dict else "scalar"

    @property
    def allowed(self) -> str:
        """What may stand there, in words: "a whole number, at least 1"."""
        return ", ".join([_words(self.annotation), *_bounds(self.metadata)])


_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list of texts",
    dict: "a table (JSON object)",
    type(None): "none",
}
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def _words(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return _or([str(value) for value in get_args(annotation)])
    if origin in (Union, types.UnionType):
        return _or([_words(part) for part in get_args(annotation)])
    return _WORDS.get(origin or annotation, "a value")


def _or(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _bounds(metadata: Sequence[Any]) -> list[str]:
    return [
        f"{text} {getattr(limit, name):.15g}"
        for limit in metadata
        for name, text in _BOUNDS.items()
        if isinstance(getattr(limit, name, None), (int, float))
    ]


@cache
def declared_keys() -> dict[str, Key]:
    """Every key by its path, in the order of declaration."""
    return {key.path: key for key in _walk(Settings, "")}


def _walk(model: type[BaseModel], prefix: str) -> list[Key]:
    keys: list[Key] = []
    for name, field in model.model_fields.items():
        path = prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += _walk(field.annotation, path + ".")
        else:
            keys.append(_key(path, field))
    return keys


def _key(path: str, field: FieldInfo) -> Key:
    default = None if field.default is PydanticUndefined else field.default
    return Key(
        path=path,
        annotation=field.annotation,
        metadata=tuple(field.metadata),
        default=default,
        description=" ".join((field.description or "").split()),
    )


def key_of(path: str) -> Key | None:
    """The key that `path` names or lies inside ("environment.args.size" is part of "environment.args")."""
    key = declared_keys().get(path)
    if key is not None:
        return key
    outer = path.rpartition(".")[0]
    found = key_of(outer) if outer else None
    return found if found is not None and found.kind in ("dict", "list") else None


def sections() -> list[str]:
    """Names of the sections, in the order of declaration."""
    return list(dict.fromkeys(key.section for key in declared_keys().values() if key.section))


def nearest(path: str) -> str | None:
    """The key or section that somebody who wrote `path` most likely meant."""
    section, _, name = path.rpartition(".")
    if section and section not in sections():
        meant = difflib.get_close_matches(section, sections(), 1, 0.6)
        if meant:
            return f"{meant[0]}.{name}" if f"{meant[0]}.{name}" in declared_keys() else meant[0]
    by_name = {key.rpartition(".")[2]: key for key in reversed(declared_keys())}
    siblings = {key.rpartition(".")[2]: key for key in declared_keys() if section and key.startswith(section + ".")}
    tops = {} if section else {top: top for top in sections()}
    for names, cutoff in ((by_name, 1.0), (siblings, 0.6), (tops, 0.6), (by_name, 0.75)):
        close = difflib.get_close_matches(name, names, 1, cutoff)
        if close:
            return names[close[0]]
    return None
