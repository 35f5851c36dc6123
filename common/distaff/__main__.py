"""The command `distaff`, also as `python -m distaff`.

Invariant: where only the base is installed, which has no command line, it says what to install (exit code 2).
"""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line and return the exit code."""
    try:
        from distaff.cli.main import main as run
    except ModuleNotFoundError as error:
        if (error.name or "distaff").partition(".")[0] == "distaff":
            raise
        sys.stderr.write(
            f"distaff: {error.name} is not installed: the base install, for trainers, has no command line. "
            'Install a role: pip install "distaff[all]", or producer, worker, consumer instead of all\n'
        )
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
