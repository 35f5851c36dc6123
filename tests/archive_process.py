"""A real archive writer to be killed: appends numbered records until it dies, and says on stdout what `sync` promised.

Arguments: directory, compression. Each line on stdout is an id that is durable.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from distaff_consumer.jsonl import JsonlWriter


def main() -> None:
    with JsonlWriter(Path(sys.argv[1]), rotate_bytes=20_000, compression=sys.argv[2]) as writer:  # type: ignore[arg-type]
        number = len(writer)
        while True:
            ids = [f"run-{n:09d}" for n in range(number, number + 1 + number % 5)]
            for group_id in ids:
                writer.append(group_id, {"text": os.urandom(400).hex() + "\u2028"})
            if writer.sync():
                os.write(1, "".join(f"{group_id}\n" for group_id in ids).encode())
            number += len(ids)


if __name__ == "__main__":
    main()
