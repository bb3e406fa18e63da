"""`python -m tests.lab sweep`: remove what labs left whose owners are dead."""

from __future__ import annotations

import sys

from tests.lab.sweep import sweep


def main(arguments: list[str]) -> int:
    """Exit code 0, or 2 for a usage error."""
    if arguments != ["sweep"]:
        sys.stderr.write("usage: python -m tests.lab sweep\n")
        return 2
    for tag in sweep():
        sys.stdout.write(f"swept lab {tag}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
