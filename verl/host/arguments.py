"""Command-line arguments: an option is `name=value`, as settings are, or `--name value`.

Only the standard library is needed, so that every command can use it.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

from verl.registry import nearest

_NAMED = re.compile(r"(?:--)?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)


class Argument(NamedTuple):
    """name: of a known option, with its value; None: any other argument, which is the value"""

    name: str | None
    value: str


def read_arguments(argv: Sequence[str], takes_value: Mapping[str, bool]) -> Iterator[Argument]:
    """The arguments of a command line.

    takes_value: {option, with underscores: whether it has a value}; a switch is `--name`, `name=true` or `name=false`
    Raises ValueError for an option without its value, or a switch with another value.
    """
    rest = iter(argv)
    for word in rest:
        match = _NAMED.fullmatch(word)
        name = match[1].replace("-", "_") if match else ""
        if match is None or name not in takes_value or (match[2] is None and not word.startswith("--")):
            yield Argument(None, word)
        elif takes_value[name]:
            value = next(rest, None) if match[2] is None else match[2]
            if value is None:
                raise ValueError(f"{word} needs a value: {name}=..")
            yield Argument(name, value)
        elif match[2] not in (None, "true", "false"):
            raise ValueError(f"{word}: expected {name}=true or {name}=false")
        elif match[2] != "false":
            yield Argument(name, "true")


def unknown_option(word: str, known: Sequence[str]) -> str:
    """What is wrong with a word, with the nearest option in its own spelling. known: names with underscores"""
    dashes = "--" if word.startswith("--") else ""
    spelled = [f"{dashes}{each.replace('_', '-') if dashes else each}" for each in known]
    name = word.partition("=")[0]
    return f"unknown option {name!r}; {nearest(name if dashes else name.replace('-', '_'), spelled)}"


class Arguments(argparse.ArgumentParser):
    """A parser whose options and positional arguments may be `name=value`, and whose errors are one line.

    A file whose own name has = is written ./name=value, if an option has its name or it is not there yet.
    """

    def __init__(self, prog: str, description: str | None) -> None:
        form = argparse.RawDescriptionHelpFormatter
        epilog = "Options may also be written name=value: port=8001 is --port 8001, and serve=true is --serve."
        super().__init__(prog=prog, description=description, epilog=epilog, formatter_class=form, allow_abbrev=False)

    def options(self) -> dict[str, argparse.Action]:
        """Every option and positional argument that --help shows, by its name with underscores."""
        return {name: action for name, action in self._named().items() if action.help != argparse.SUPPRESS}

    def read(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """The values of all options; argv: None for the process's own. Raises SystemExit for what cannot be used."""
        return self.parse_args(self._spelled_out(sys.argv[1:] if argv is None else argv))

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help lists all options)\n")

    def _named(self) -> dict[str, argparse.Action]:
        return {(each.option_strings or [each.dest])[-1].lstrip("-").replace("-", "_"): each for each in self._actions}

    def _spelled_out(self, argv: Sequence[str]) -> list[str]:
        """The arguments as argparse reads them: positional arguments in their order after the options."""
        named = self._named()
        dashed: list[str] = []
        places: dict[str, list[str]] = {name: [] for name, action in named.items() if not action.option_strings}
        others: list[str] = []
        try:
            for name, value in read_arguments(argv, {name: action.nargs != 0 for name, action in named.items()}):
                if name is None:
                    others.append(self._checked(value))
                elif name in places:
                    places[name] += _listed(value, named[name].nargs == "+")
                elif named[name].nargs == 0:
                    dashed.append(named[name].option_strings[-1])
                else:
                    many = isinstance(named[name].default, list)
                    dashed += [f"{named[name].option_strings[-1]}={each}" for each in _listed(value, many)]
        except ValueError as error:
            self.error(str(error))
        return [*dashed, *_placed(places, others)]

    def _checked(self, word: str) -> str:
        """Raises SystemExit for a word that looks like an option but is none."""
        named = _NAMED.fullmatch(word)
        if word.startswith("--") or (named is not None and named[2] is not None and not Path(word).exists()):
            self.error(unknown_option(word, list(self.options())))
        return word


def _listed(value: str, many: bool) -> list[str]:
    """`[a,b]` of what may be given several times, as its items."""
    if many and value.startswith("[") and value.endswith("]"):
        return [each.strip() for each in value[1:-1].split(",")]
    return [value]


def _placed(places: Mapping[str, Sequence[str]], others: Sequence[str]) -> list[str]:
    """Positional arguments in their order: by name, else the next of the others."""
    rest = iter(others)
    given = [list(values) or [each for each in [next(rest, None)] if each is not None] for values in places.values()]
    return [*(each for values in given for each in values), *rest]


def positive_int(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def positive_float(text: str) -> float:
    with suppress(ValueError):
        if math.isfinite(number := float(text)) and number > 0:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
