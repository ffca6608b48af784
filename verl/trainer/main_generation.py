"""`toolrl generate`, and `toolrl chat` with --chat, as a module of the trainer."""

import sys
from collections.abc import Sequence

from toolrl.serve.generation import command


def main(argv: Sequence[str]) -> int:
    if "--chat" in argv:
        from toolrl.serve import chat  # a slow import

        return chat.main([each for each in argv if each != "--chat"])
    return command.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
