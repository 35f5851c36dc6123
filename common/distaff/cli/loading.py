"""Reads the settings: defaults, then the file, then the environment, then the flags.

Invariant: a key nobody declared, wherever it stands, is an error that names the nearest one; every error says where the
value came from. No error message contains a secret.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from distaff.cli.declared import PREFIX, declared_keys, key_of, nearest, sections
from distaff.errors import ConfigurationError
from distaff.redaction import redact
from distaff.settings import Settings

Tree = dict[str, Any]
UNDECLARED = frozenset({"DISTAFF_CONFIG"})
"""Variables with our prefix that are not settings. DISTAFF_CONFIG names the file when no argument does."""


class _Schema(BaseSettings, Settings):
    model_config = SettingsConfigDict(env_prefix=PREFIX, env_nested_delimiter="__", env_ignore_empty=True)


class _Environment(EnvSettingsSource):
    """As pydantic-settings reads it, and a list may also be written a,b,c; what is no JSON is left for validation to refuse."""

    def decode_complex_value(self, field_name: str, field: FieldInfo | None, value: Any) -> Any:
        return decode(value, is_list=field is not None and str(field.annotation).startswith("list"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What one source says."""

    data: Tree
    labels: Mapping[str, str]
    """Path -> where it was written; a path that is not in it takes the label of the nearest path around it, or `label`."""
    label: str

    def origin(self, path: str) -> str:
        while path:
            if path in self.labels:
                return self.labels[path]
            path = path.rpartition(".")[0]
        return self.label


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    settings: Settings
    origins: dict[str, str]
    """Path of every key -> "default", the file, the variable or the flag that set it."""


def load(*, file: Path | None = None, flags: Tree | None = None, defaults: Tree | None = None) -> Loaded:
    """Merge all sources. `flags`: as `distaff.cli.flags` parsed them; `defaults`: the command's own, weaker than the file.

    Raises ConfigurationError, with every mistake found, one a line.
    """
    chosen = file or (Path(os.environ["DISTAFF_CONFIG"]) if os.environ.get("DISTAFF_CONFIG") else None)
    layers = [
        Layer(data=defaults or {}, labels={}, label="default"),
        *([read_file(chosen)] if chosen else []),
        read_environment(),
        Layer(data=flags or {}, labels={key.path: key.flag for key in declared_keys().values()}, label="flags"),
    ]
    settings = validated(layers)
    origins = {path: _origin(layers, path) or "default" for path in declared_keys()}
    base = chosen.parent if chosen and origins["tokenizer.chat_template"] == str(chosen) else Path()
    return Loaded(settings=_with_template(settings, base, origins["tokenizer.chat_template"]), origins=origins)


def read_file(path: Path) -> Layer:
    """A TOML file (or JSON, by its suffix)."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise ConfigurationError(f"{path}: there is no such file; give the path of a TOML file with settings") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: cannot be read as a text file: {error}") from None
    try:
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid {path.suffix.lstrip('.').upper() or 'TOML'}: {error}") from None
    if not isinstance(data, dict):
        raise ConfigurationError(f"{path}: expected one object of sections")
    return Layer(data=data, labels={}, label=str(path))


def read_environment() -> Layer:
    """The variables that begin with DISTAFF_. An empty one counts as not set. Raises ConfigurationError for unknown ones."""
    names = {
        name[len(PREFIX) :].lower().replace("__", "."): name
        for name, value in os.environ.items()
        if name.upper().startswith(PREFIX) and name.upper() not in UNDECLARED and value
    }
    wrong = [
        f"environment variable {names[path]} is no setting{_variable_hint(path)}"
        for path in names
        if key_of(path) is None and path not in sections() and not path.endswith("api_key")
    ]
    if wrong:
        raise ConfigurationError("\n".join(wrong))
    return Layer(data=_Environment(_Schema)(), labels=names, label="environment")


def _variable_hint(path: str) -> str:
    """People write one underscore where two belong."""
    flat = {key.replace(".", "_"): key for key in declared_keys()}
    meant = flat.get(path.replace(".", "_")) or nearest(path)
    if meant is None:
        return "; `distaff run --help` lists them all"
    key = declared_keys().get(meant)
    return f"; did you mean {key.variable if key else PREFIX + meant.upper() + '__...'}?"


def decode(value: Any, *, is_list: bool) -> Any:
    """JSON where it is JSON; a list may be written without brackets; anything else stays text."""
    if not isinstance(value, str):
        return value
    if is_list and not value.lstrip().startswith("["):
        return [part.strip() for part in value.split(",") if part.strip()]
    try:
        return json.loads(value)
    except ValueError:
        return value


def validated(layers: list[Layer]) -> Settings:
    """The settings the layers give, later ones winning key by key. Raises ConfigurationError."""
    merged: Tree = {}
    for layer in layers:
        merged = _merged(merged, layer.data)
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        raise ConfigurationError("\n".join(_problems(error, layers))) from None


def _merged(base: Tree, over: Tree) -> Tree:
    result = dict(base)
    for name, value in over.items():
        old = result.get(name)
        result[name] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _problems(error: ValidationError, layers: list[Layer]) -> Iterator[str]:
    for item in error.errors(include_url=False):
        if item["type"] == "default_factory_not_called":
            continue
        path = ".".join(str(part) for part in item["loc"])
        where = _origin(layers, path) or "settings"
        yield redact(f"{where}: {_problem(path, item['type'], item['msg'], item['input'])}")


def _problem(path: str, kind: str, message: str, value: Any) -> str:
    if kind == "extra_forbidden":
        return f"unknown key {path}{_key_hint(path)}"
    if kind == "value_error":
        return f"{path}: {message.removeprefix('Value error, ')}"
    key = key_of(path)
    shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
    if key is None:
        return f"{path} = {shown}: must be a section" if path in sections() else f"{path}: {message}"
    return f"{path} = {shown}: must be {key.allowed}"


def _key_hint(path: str) -> str:
    meant = nearest(path)
    if meant:
        return f"; did you mean {meant}?"
    siblings = [key for key in declared_keys() if key.startswith(path.rpartition(".")[0] + ".")]
    return f"; known are {', '.join(siblings or sections())}"


def _origin(layers: list[Layer], path: str) -> str | None:
    """Label of the strongest layer that sets `path` (or something inside or around it)."""
    for layer in reversed(layers):
        node: Any = layer.data
        parts = path.split(".")
        while parts and isinstance(node, dict) and parts[0] in node:
            node = node[parts.pop(0)]
        if not parts or (node is not layer.data and not isinstance(node, dict)):
            return layer.origin(path)
    return None


def _with_template(settings: Settings, folder: Path, origin: str) -> Settings:
    template = settings.tokenizer.chat_template
    if not template.startswith("@"):
        return settings
    path = folder / template[1:]
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigurationError(f"{origin}: tokenizer.chat_template: cannot read {path}: {reason}") from None
    return settings.model_copy(update={"tokenizer": settings.tokenizer.model_copy(update={"chat_template": text})})
