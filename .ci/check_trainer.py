"""Run in a bare venv that holds the base wheel only, from a folder with a trainer's own `common` and `worker` packages."""

import importlib
import pkgutil
import sys

FORBIDDEN = {"rq", "verifiers", "openai", "transformers", "pydantic", "structlog", "zstandard"}
BASE = ["types", "errors", "keys", "wire", "consumer", "aconsumer", "policy", "clients", "scripts", "runs"]


def main() -> None:
    import common
    import worker

    import distaff

    if (common.WHOSE, worker.WHOSE) != ("the trainer", "the trainer"):
        sys.exit(f"base wheel: a trainer's own packages are hidden: {common.__file__}, {worker.__file__}")
    there = {module.name for module in pkgutil.iter_modules(distaff.__path__)}
    for name in BASE:
        if name not in there:
            sys.exit(f"base wheel: distaff.{name} is missing")
        importlib.import_module(f"distaff.{name}")
    if loaded := FORBIDDEN & sys.modules.keys():
        sys.exit(f"base wheel: importing distaff loads {', '.join(sorted(loaded))}")
    print(f"base wheel: ok, {len(BASE)} modules imported beside a trainer's own packages")


main()
