"""One flag for every declared key, for argparse.

Invariant: flags only collect texts, by key path; what a text means and whether it is allowed is decided where file and
environment are checked too (`distaff.cli.loading`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin

from distaff.cli.declared import Key, declared_keys, nearest
from distaff.cli.loading import Tree, decode
from distaff.errors import ConfigurationError
from distaff.redaction import redact

_DEST = "set "
_BOOLEANS = ("true", "false", "1", "0", "yes", "no", "on", "off")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose mistakes are ConfigurationErrors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{redact(message)}\n{self.format_usage().strip()}")


def add_flags(parser: argparse.ArgumentParser, *, shown: Sequence[str], shortcuts: Mapping[str, str]) -> None:
    """Add a flag for every key. `shown`: sections (and top-level keys) that --help lists; `shortcuts`: flag -> key."""
    groups: dict[str, Any] = {}
    for key in declared_keys().values():
        place = key.section or "settings"
        group = groups.setdefault(place, parser.add_argument_group(place))
        names = [*(flag for flag, path in shortcuts.items() if path == key.path), key.flag]
        visible = (key.section or key.path) in shown or key.path in shortcuts.values()
        group.add_argument(
            *names,
            dest=_DEST + key.path,
            action="append",
            metavar=_metavar(key),
            help=_help(key) if visible else argparse.SUPPRESS,
        )


def _metavar(key: Key) -> str:
    if get_origin(key.annotation) is Literal:
        return "|".join(str(value) for value in get_args(key.annotation))
    return {"bool": "true|false", "list": "A,B", "dict": "KEY=VALUE"}.get(key.kind, "X")


def _help(key: Key) -> str:
    default = "" if key.default in (None, "", {}) else f" [{json.dumps(key.default, default=str)}]"
    return (key.description + default).replace("%", "%%") or key.allowed


def normalized(argv: Sequence[str], shortcuts: Mapping[str, str]) -> list[str]:
    """`argv` in the one spelling argparse knows.

    Underscores in flags become hyphens; `--worker.burst` alone is true and `--no-worker.burst` false;
    `--environment.args.size 3` is `--environment.args size=3`.
    """
    flags = {key.flag: key for key in declared_keys().values()}
    flags |= {flag: declared_keys()[path] for flag, path in shortcuts.items()}
    result: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*result, word, *rest]
        name, equals, value = word.partition("=")
        hyphened = name.replace("_", "-")
        key = flags.get(hyphened)
        negated = flags.get("--" + hyphened.removeprefix("--no-")) if hyphened.startswith("--no-") else None
        if key is not None and key.kind == "bool" and not equals:
            value = rest.pop(0) if rest and rest[0].lower() in _BOOLEANS else "true"
            result.append(f"{hyphened}={value}")
        elif key is not None:
            result.append(hyphened + equals + value)
            if not equals and rest:
                result[-1] += "=" + rest.pop(0)
        elif negated is not None and negated.kind == "bool" and not equals:
            result.append(f"{negated.flag}=false")
        elif (entry := _table_entry(name)) is not None and (equals or rest):
            table, item = entry
            result.append(f"{table.flag}={item}={value if equals else rest.pop(0)}")
        else:
            result.append(word)
    return result


def _table_entry(flag: str) -> tuple[Key, str] | None:
    for key in declared_keys().values():
        for start in (key.flag + ".", "--" + key.path + "."):
            if key.kind == "dict" and flag.startswith(start):
                return key, flag[len(start) :]
    return None


def collect(parsed: argparse.Namespace) -> Tree:
    """The settings that flags gave, nested as in the file. Raises ConfigurationError for a table entry without "="."""
    tree: Tree = {}
    for dest, texts in vars(parsed).items():
        if not dest.startswith(_DEST) or texts is None:
            continue
        key = declared_keys()[dest.removeprefix(_DEST)]
        section, _, name = key.path.rpartition(".")
        target = tree.setdefault(section, {}) if section else tree
        target[name] = _value(key, texts)
    return tree


def _value(key: Key, texts: list[str]) -> Any:
    if key.kind == "list":
        decoded = [decode(text, is_list=True) for text in texts]
        return [item for value in decoded for item in (value if isinstance(value, list) else [value])]
    if key.kind == "dict":
        return _table(key, texts)
    last = texts[-1]
    return None if key.optional and last.lower() in ("none", "null") else last


def _table(key: Key, texts: list[str]) -> Any:
    table: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if text.lstrip().startswith("{"):
            whole = decode(text, is_list=False)
            if not isinstance(whole, dict):
                return whole
            table |= whole
        elif equals:
            table[name] = decode(value, is_list=False)
        else:
            raise ConfigurationError(f"{key.flag}: give NAME=VALUE or a JSON object, not {redact(text)!r}")
    return table


def unknown_flag(word: str) -> ConfigurationError:
    """The error for an argument nobody knows."""
    name = word.partition("=")[0]
    meant = nearest(name.lstrip("-").replace("-", "_"))
    key = declared_keys().get(meant or "")
    hint = f"; did you mean {key.flag if key else f'--{meant}.…'}?" if meant else "; --help lists them"
    return ConfigurationError(
        f"unknown {'flag' if word.startswith('-') else 'argument'} {redact(name)}{hint if word.startswith('-') else ''}"
    )
