"""`toolrl eval`, and `toolrl probe` with --probe, as a module of the trainer."""

import sys
from collections.abc import Sequence

from toolrl.benchmarks.runner import command
from toolrl.check.probe import command as probe_command


def main(argv: Sequence[str]) -> int:
    if "--probe" in argv:
        return probe_command.main([each for each in argv if each != "--probe"])
    return command.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
