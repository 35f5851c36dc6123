"""Which verifiers is installed, and which of its two APIs it has: 0.3 has the classic one and v1, 0.4 has v1 alone.

Invariant: asks the import system and the packages' metadata; importing this module imports no verifiers.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from pathlib import Path

BOTH_APIS = "verifiers>=0.3.1,<0.4"
"""The releases that have both, as pip takes them."""


def version() -> str:
    """Of the installed verifiers, "none" without one."""
    try:
        return importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def installed() -> bool:
    """Whether there is a verifiers to import."""
    return importlib.util.find_spec("verifiers") is not None


def has_classic() -> bool:
    """Whether the installed verifiers plays classic environments."""
    return installed() and importlib.util.find_spec("verifiers.legacy") is not None


def preload() -> None:
    """Import what of verifiers takes seconds; starts no thread."""
    import verifiers

    if has_classic():
        _ = verifiers.Environment
    else:
        import verifiers.v1


def defines_classic(name: str) -> bool:
    """Whether the source of a module that could not be imported gives it a `load_environment`."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return False
    try:
        body = ast.parse(Path(spec.origin).read_bytes()).body
    except (OSError, SyntaxError):
        return False
    return any(_gives(node, "load_environment") for node in body)


def _gives(node: ast.stmt, name: str) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name == name
    return isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names)


def no_classic(environment_id: str) -> str:
    """What to tell someone who names a classic environment where only v1 is installed."""
    return (
        f"environment {environment_id!r} is a classic one (`load_environment`), and verifiers {version()}, which is installed, has only the "
        f"v1 API. Install a release that has both: pip install '{BOTH_APIS}'"
    )
