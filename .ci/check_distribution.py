"""Fails unless a wheel or an sdist holds the four packages whole (Lua scripts and py.typed too), and the wheel nothing else."""

import sys
import tarfile
import zipfile
from pathlib import Path

PACKAGES = {
    "distaff": "common",
    "distaff_producer": "producer",
    "distaff_worker": "worker",
    "distaff_consumer": "consumer",
}


def expected(root: Path, *, with_root: bool) -> set[str]:
    """Every source file of the four packages, as named inside the archive."""
    names = set()
    for package, folder in PACKAGES.items():
        for path in (root / folder / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                names.add(path.relative_to(root if with_root else root / folder).as_posix())
    return names


def held(archive: Path) -> set[str]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name for name in wheel.namelist() if not name.endswith("/")}
    with tarfile.open(archive) as sdist:
        return {member.name.partition("/")[2] for member in sdist if member.isfile()}


def main() -> None:
    root = Path(__file__).resolve().parent.parent
    for argument in sys.argv[1:]:
        archive = Path(argument)
        names = held(archive)
        is_wheel = archive.suffix == ".whl"
        if missing := expected(root, with_root=not is_wheel) - names:
            sys.exit(f"{archive.name} lacks {', '.join(sorted(missing))}")
        tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
        if is_wheel and tops != PACKAGES.keys():
            sys.exit(f"{archive.name} also holds {', '.join(sorted(tops - PACKAGES.keys()))}")
        if stray := [name for name in names if name.startswith((".venv", ".ci/", "tests/")) or "__pycache__" in name]:
            sys.exit(f"{archive.name} holds what is not for users: {', '.join(stray[:5])}")
        print(f"{archive.name}: ok, {len(names)} files")


main()
