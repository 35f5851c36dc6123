"""Prints the settings: effective values for --print-config, the table of all keys for the documentation.

Invariant: what is printed as TOML can be read again (secrets apart, which are masked).
"""

from __future__ import annotations

import json
from typing import Any

from distaff.cli.declared import Key, declared_keys
from distaff.cli.loading import Loaded
from distaff.redaction import MASK, redact


def effective_toml(loaded: Loaded) -> str:
    """Every key with its value, and where it came from as a comment."""
    values = loaded.settings.model_dump(mode="json")
    lines: list[str] = []
    section = ""
    for key in sorted(declared_keys().values(), key=lambda key: bool(key.section)):
        if key.section != section:
            section = key.section
            lines += ["", f"[{section}]"]
        value = _masked(values[key.section][key.path.rpartition(".")[2]] if key.section else values[key.path])
        name = key.path.rpartition(".")[2]
        text = f"# {name} =" if value is None else f"{name} = {_toml(value)}"
        lines.append(f"{text}  # {loaded.origins[key.path]}")
    return "\n".join(lines).strip()


def _masked(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list):
        return [_masked(item) for item in value]
    if isinstance(value, dict):
        return {name: MASK if _is_secret(name) else _masked(item) for name, item in value.items()}
    return value


def _is_secret(name: str) -> bool:
    return name.lower().replace("-", "_").endswith(("api_key", "password", "secret", "token", "authorization"))


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{_string(name)} = {_toml(item)}" for name, item in value.items() if item is not None)
            + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value if item is not None) + "]"
    return _string(value) if isinstance(value, str) else json.dumps(value)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def reference() -> str:
    """All keys as Markdown tables, one for each section: the body of docs/configuration.md."""
    parts: list[str] = []
    for section in dict.fromkeys(key.section for key in declared_keys().values()):
        parts.append(f"### `[{section}]`" if section else "### Top level")
        parts.append("| key | default | allowed | meaning |\n|---|---|---|---|")
        parts[-1] += "".join(f"\n{_row(key)}" for key in declared_keys().values() if key.section == section)
    return "\n\n".join(parts) + "\n"


def _row(key: Key) -> str:
    default = "" if key.default is None else f"`{_toml(key.default)}`"
    cells = [f"`{key.path}`", default, key.allowed, key.description]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
