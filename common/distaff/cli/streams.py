"""Makes sure that the three standard streams are there.

Invariant: after `secure`, descriptors 0, 1 and 2 are open, here and in processes started from here: one that a service manager had closed would be given to the next socket, and
whatever prints would write into that.
"""

from __future__ import annotations

import os
import sys


def secure() -> None:
    """Open what is closed, on the null device. To be called before anything else is opened."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(
                os.open(os.devnull, os.O_RDWR), True
            )  # it gets the lowest free number, which is this one
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - for the life of the process
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
