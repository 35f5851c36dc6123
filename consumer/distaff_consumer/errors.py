"""What the consumers raise on purpose, beside the tree in `distaff.errors`."""

from __future__ import annotations

from distaff.errors import DistaffError


class ArchiveError(DistaffError):
    """A file of an archive is damaged before its end, or the disk refuses it for a reason that waiting does not mend."""

    boundary = "archive"
