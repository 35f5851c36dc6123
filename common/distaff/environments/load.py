"""Find an environment by its id, tell which verifiers API it speaks, and build it.

Invariant: every way this can fail is an EnvironmentLoadError or ConfigurationError that says how to mend it, and the
process's signal handlers are afterwards what they were (verifiers replaces SIGINT and SIGTERM). Main thread only.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import pkgutil
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Literal, Protocol

from distaff.config import EnvironmentSection
from distaff.environments import releases
from distaff.environments.protocol import Environment
from distaff.errors import ConfigurationError, DistaffError, EnvironmentLoadError
from distaff.types import JSON, EnvironmentRef, Split

EXAMPLES = "distaff.environments.examples"
BUILTIN_TASKSETS = "verifiers.v1.tasksets"
Api = Literal["classic", "v1"]


class Named(Protocol):
    """What tells an environment from another."""

    @property
    def id(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def api(self) -> Api: ...


def load(config: EnvironmentSection) -> Environment:
    """The environment `config` names, ready to play. Takes seconds (verifiers is imported); main thread only.

    Raises ConfigurationError (no or a malformed id) and EnvironmentLoadError (not found, not an environment, wrong arguments,
    or its own code failed).
    """
    if threading.current_thread() is not threading.main_thread():
        raise EnvironmentLoadError(
            f"environment {config.id!r}: verifiers installs signal handlers while it loads, so load it on the main thread"
        )
    with _signal_handlers_kept():
        module = find_module(config)
        return _build(config, module, _api(config, module))


def _api(config: EnvironmentSection, module: ModuleType) -> Api:
    """The API to load `module` with. Raises EnvironmentLoadError where that is the classic one and verifiers has none."""
    offered, classic_plays = apis(module), releases.has_classic()
    if config.api == "v1" or (
        config.api == "auto" and "v1" in offered and not (classic_plays and "classic" in offered)
    ):
        return "v1"
    if not classic_plays:
        raise EnvironmentLoadError(releases.no_classic(config.id))
    return "classic"


def find_module(config: EnvironmentSection) -> ModuleType:
    """The module that `config.id` means: the importable one of that name, else a taskset inside verifiers, else a shipped
    example; one that is no environment is passed over."""
    name = module_name(config.id)
    first: ModuleType | None = None
    for candidate in _candidates(name):
        module = _import(config.id, candidate)
        if module is not None and apis(module) & ({"classic", "v1"} if config.api == "auto" else {config.api}):
            return module
        first = first or module
    raise EnvironmentLoadError(_not_found(config.id, name) if first is None else _no_environment(config, first))


def _candidates(name: str) -> list[str]:
    if "." in name:
        return [name]
    verifiers = importlib.util.find_spec("verifiers")
    places = verifiers.submodule_search_locations if verifiers and verifiers.submodule_search_locations else []
    tasksets = {info.name for info in pkgutil.iter_modules([f"{place}/v1/tasksets" for place in places])}
    return [name, f"{EXAMPLES}.{name}", *([f"{BUILTIN_TASKSETS}.{name}"] if name in tasksets else [])]


def module_name(environment_id: str) -> str:
    """ "owner/my-env@1.2" -> "my_env". Raises ConfigurationError for what cannot name a module."""
    name = environment_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")
    if not name:
        raise ConfigurationError(
            f"environment.id is empty. Name an environment, for example {', '.join(examples()[:3])}"
        )
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigurationError(
            f"environment.id {environment_id!r} cannot be a module name. Give the name of an installed environment "
            "(my-env), a hub id (owner/my-env) or a dotted module (package.module)"
        )
    return name


def apis(module: ModuleType) -> set[Api]:
    """classic: the module has `load_environment`. v1: `__all__` exports a Taskset. It may have both (classic is then taken,
    unless the configuration says otherwise) or neither."""
    exported = (getattr(module, name, None) for name in getattr(module, "__all__", ()))
    found: set[Api] = {"classic"} if callable(getattr(module, "load_environment", None)) else set()
    return found | ({"v1"} if any(isinstance(cls, type) and _is_taskset(cls) for cls in exported) else set())


def examples() -> list[str]:
    """Ids of the environments distaff ships."""
    package = importlib.import_module(EXAMPLES)
    return sorted(info.name.replace("_", "-") for info in pkgutil.iter_modules(package.__path__) if info.name[0] != "_")


def environment_ref(env: Named, config: EnvironmentSection, split: Split) -> EnvironmentRef:
    """What identifies `env` in a group."""
    return EnvironmentRef(id=env.id, version=env.version, api=env.api, split=split, args_hash=config.args_hash())


def item_key(env: Environment, config: EnvironmentSection, split: Split, row: int | Mapping[str, JSON]) -> str:
    """Names a row across runs: "id@version/args hash/split/row". A row given as data goes by 16 hex digits of its SHA-256."""
    name = str(row) if isinstance(row, int) else _digest(row)
    return f"{env.id}@{env.version}/{config.args_hash()}/{split}/{name}"


def _digest(row: Mapping[str, JSON]) -> str:
    canonical = json.dumps(row, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def _import(environment_id: str, name: str) -> ModuleType | None:
    """The module, None when there is none of that name. Whatever its own code raises is an EnvironmentLoadError."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (error.name == name or name.startswith(f"{error.name}.")):
            return None
        problem = f"{name} needs the module {error.name!r}, which is not installed. {_how_to_install(error.name or '')}"
        raise _import_failed(environment_id, name, problem) from error
    except (Exception, SystemExit) as error:
        problem = f"importing {name} failed with {type(error).__name__}: {_one_line(error)}"
        raise _import_failed(environment_id, name, problem) from error


def _import_failed(environment_id: str, name: str, problem: str) -> EnvironmentLoadError:
    if releases.installed() and not releases.has_classic() and releases.defines_classic(name):
        return EnvironmentLoadError(releases.no_classic(environment_id))
    return EnvironmentLoadError(f"environment {environment_id!r}: {problem}")


def _how_to_install(module: str) -> str:
    top = module.split(".")[0]
    wanted = "'distaff[environments]'" if top == "verifiers" else top.replace("_", "-")
    return f"Install it: pip install {wanted}"


def _build(config: EnvironmentSection, module: ModuleType, api: Api) -> Environment:
    version = distribution_version(module)
    try:
        if api == "classic":
            from distaff.environments import classic

            _check_arguments(config, module)
            return classic.build(module, environment_id=config.id, version=version, args=config.args)
        from distaff.environments import v1

        return v1.build(module, environment_id=config.id, version=version, args=config.args)
    except DistaffError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentLoadError(
            f"environment {config.id!r} could not be built with the arguments {json.dumps(config.args)}: "
            f"{type(error).__name__}: {_one_line(error)}"
        ) from error


def _check_arguments(config: EnvironmentSection, module: ModuleType) -> None:
    signature = inspect.signature(module.load_environment)
    try:
        signature.bind(**config.args)
    except TypeError as error:
        raise EnvironmentLoadError(
            f"environment {config.id!r}: {error}. {module.__name__}.load_environment takes ({_parameters(signature)}); "
            "set them under [environment.args]"
        ) from error


def _parameters(signature: inspect.Signature) -> str:
    return ", ".join(str(p.replace(annotation=inspect.Parameter.empty)) for p in signature.parameters.values())


def distribution_version(module: ModuleType) -> str:
    """Version of the distribution that holds `module`, "0" where there is none."""
    top = module.__name__.split(".")[0]
    for name in (top, *distributions().get(top, ())):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "0"


@functools.cache
def distributions() -> Mapping[str, list[str]]:
    """Top-level module -> distributions; reading it takes half a second."""
    return importlib.metadata.packages_distributions()


def _is_taskset(cls: type) -> bool:
    return any(base.__name__ == "Taskset" and base.__module__.startswith("verifiers.v1") for base in cls.__mro__)


def _no_environment(config: EnvironmentSection, module: ModuleType) -> str:
    place = f"environment {config.id!r}: the module {module.__name__} ({getattr(module, '__file__', '?')})"
    lacks = {"classic": "has no `load_environment`", "v1": "exports no Taskset in `__all__`"}
    if config.api == "auto":
        return f"{place} is no environment: it {lacks['classic']} (classic) and {lacks['v1']} (v1). Name another module"
    return f"{place} {lacks[config.api]}, and environment.api is set to {config.api}. Leave it at auto, or name another module"


def _not_found(environment_id: str, name: str) -> str:
    shipped = examples()
    near = difflib.get_close_matches(name.replace("_", "-"), shipped, n=2, cutoff=0.6)
    hint = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
    return (
        f"environment {environment_id!r}: there is no module {name!r}. {hint}Install it (pip install "
        f"{name.split('.')[0].replace('_', '-')}), or put the folder that holds it on PYTHONPATH, or use one that ships with distaff: "
        f"{', '.join(shipped)}"
    )


def _one_line(error: BaseException) -> str:
    """The error's text on one line; pydantic's errors as "field: message"."""
    errors = getattr(error, "errors", None)
    if callable(errors):
        parts = [f"{'.'.join(map(str, item['loc'])) or 'value'}: {item['msg']}" for item in errors()]
        return "; ".join(parts)
    return " ".join(str(error).split())
