"""placeholder"""

from distaff.settings import Settings


def demo(settings: Settings, *, quick: bool) -> int:
    """Not yet."""
    raise NotImplementedError
