"""Fetch published rows with tool calls, for scripts/learn_calls.sh: Seal-Tools, ToolAlpaca and Glaive.

    python scripts/get_calls_data.py                     # fetches the published commits; needs git and a network
    python scripts/get_calls_data.py --folder DOWNLOADS  # copies from files at hand

Every file is verified by its hash. Seal-Tools and ToolAlpaca are those of MadeAgents/Hammer's tests, Glaive is the part
that RUC-NLPIR/Tool-Star quotes of LLaMA-Factory's demonstrations. All three are Apache-2.0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout that is not installed, too

from scripts.get_toolrl_data import Published, checked_out, copy_all
from verl.errors import DataError, VerlError
from verl.host.exits import write_error

OUT = "dataset/calls"
REPOSITORIES = {  # name: commit, and the files by what they are called here
    "https://github.com/MadeAgents/Hammer": (
        "ff415d9998180b5a68bbfdda3309ec04b472fb49",
        {
            "sealtools_test.json": Published(
                "data/test/original/sealtool.json", "113238730efce7de0044547bc2d0aab5e877c4e1c2bafe711a3c2390075ebaef"
            ),
            "toolalpaca_test.json": Published(
                "data/test/original/toolalpaca.json", "d61e5ede4dd32aa977fade4396b43c7cc39279a98409b64df13ed50815989754"
            ),
        },
    ),
    "https://github.com/RUC-NLPIR/Tool-Star": (
        "8e5936f68bfa67a531566f8aa982e490668c31b3",
        {
            "glaive_toolcall_en.json": Published(
                "LLaMA-Factory-main/data/glaive_toolcall_en_demo.json",
                "8b84773e44e71881f32490080350734cad3069dc227eafd771ccfb80732f6437",
            )
        },
    ),
}


def fetch(folder: Path | None, out: Path, console: Console) -> None:
    """folder: of files at hand, under the names that they get here"""
    for repository, (commit, files) in REPOSITORIES.items():
        at_hand = {name: Published(name, each.sha256) for name, each in files.items()}
        try:
            if folder is not None:
                copy_all(folder, at_hand, out, console)
            else:
                with checked_out(repository, commit) as clone:
                    copy_all(clone, files, out, console)
        except DataError as error:
            error.hint = f"Check the network, or use --folder with a folder of {', '.join(at_hand)}, as published"
            raise


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch everything; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="copy from there instead of fetching")
    parser.add_argument("--out", type=Path, default=Path(OUT), metavar="FOLDER", help=f"default: {OUT}")
    arguments = parser.parse_args(argv)
    try:
        fetch(arguments.folder, arguments.out, Console(stderr=True, highlight=False, soft_wrap=True))
    except VerlError as error:
        return write_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
