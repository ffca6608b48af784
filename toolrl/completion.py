"""Completion of commands, keys and values in a shell: source <(toolrl completion bash|zsh)

The script is complete in itself: a Tab starts no Python. Write it again after an update.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence

from toolrl.commands import CHAT, EVAL, GENERATE, LAB, PLAN, PROBE
from verl.config.commands import SFT, TRAIN, Command
from verl.config.load import RECIPES
from verl.config.meanings import meanings
from verl.config.show import described

SHELLS = ("bash", "zsh")
_SETTINGS = {
    **{each.name: each for each in (TRAIN, SFT, GENERATE, CHAT, EVAL, PROBE, PLAN, LAB)},
    "preflight": TRAIN,
}
_SHORTHANDS = ("data", "model", "recipe")
_VALUE = r"(\w[\w-]*)(?: \([^)]*\))?"
_VALUES = re.compile(rf"{_VALUE}(?: \| {_VALUE})+")
_SCRIPT = r"""
_toolrl() {
    local line="${COMP_LINE:0:$COMP_POINT}" keys="" values="" command word key
    command="${COMP_WORDS[1]}"  # bash's name; words: allowed
    word="${line##* }"
    COMPREPLY=()
    if [[ $COMP_CWORD -eq 1 ]]; then
        COMPREPLY=($(compgen -W "@commands@" -- "$word"))
        return
    fi
    case "$command" in
@keys@
    esac
    if [[ -n "$keys" && "$word" != *=* ]]; then
        COMPREPLY=($(compgen -W "$keys" -- "$word"))
        compopt -o nospace 2> /dev/null
        return
    fi
    key="${word%%=*}"
    case "$key" in
@values@
    esac
    word="${word#*=}"
    if [[ -n "$values" ]]; then
        COMPREPLY=($(compgen -W "$values" -- "$word"))
    elif [[ -n "${ZSH_VERSION:-}" ]]; then  # whose own `compgen -f` takes the key as a part of the path
        setopt localoptions bareglobqual
        eval 'COMPREPLY=("$word"*(N))'
    else
        COMPREPLY=($(compgen -f -- "$word"))
        compopt -o filenames 2> /dev/null
    fi
    if [[ -n "${ZSH_VERSION:-}" && -n "$keys" ]]; then  # bash has split the word at =, zsh has not
        COMPREPLY=("${COMPREPLY[@]/#/$key=}")
    fi
}
complete -o default @nospace@-F _toolrl toolrl
"""


def completion(shell: str, commands: Sequence[str]) -> str:
    """The script for a shell. commands: the name of each, and what may follow it besides settings"""
    zsh = shell == "zsh"  # has no `compopt`, so no blank follows anything there
    start, nospace = ("autoload -U +X bashcompinit && bashcompinit\n", "-o nospace ") if zsh else ("", "")
    offered = {name: options.split() for name, _, options in (each.partition(" ") for each in commands)}
    offered |= {name: [*_keys(command)] for name, command in _SETTINGS.items()}
    keys = "\n".join(f'        {name}) keys="{" ".join(found)}" ;;' for name, found in offered.items() if found)
    values = "\n".join(f'        {key}) values="{" ".join(found)}" ;;' for key, found in _all_values())
    script = (
        _SCRIPT.replace("@nospace@", nospace)
        .replace("@commands@", " ".join(offered))
        .replace("@keys@", keys)
        .replace("@values@", values)
    )
    return start + script.lstrip("\n")


def _keys(command: Command) -> Iterator[str]:
    """What may follow a command."""
    yield from (f"{each}=" for each in _SHORTHANDS if each != "recipe" or command.from_recipe)
    yield from (f"{key}=" for key, *_ in described(command))
    yield from ("--help", "--config=", "--user-code", "--cfg")


def _all_values() -> Iterator[tuple[str, list[str]]]:
    """(key, its values) of the keys that have some of their own."""
    yield "recipe", sorted(each.stem for each in RECIPES.glob("*.yaml"))
    yield "model|model.path", ["embedded", "smollm2"]
    for key, kind, _, _ in described(TRAIN):
        if kind == "bool":
            yield key, ["true", "false"]
        elif found := values_of(key):
            yield key, found


def values_of(key: str) -> list[str]:
    """The values that a setting's meaning lists: `a | b (why) | c`."""
    found = _VALUES.search(meanings()[key])
    return [] if found is None else re.sub(r" \([^)]*\)", "", found[0]).split(" | ")


def main(argv: Sequence[str]) -> int:
    """argv: the commands, from `toolrl`, each with a blank and what may follow it; and the user's arguments"""
    commands = [each for each in argv if " " in each]  # from `toolrl`
    given = argv[len(commands) :]
    asked = given in (["-h"], ["--help"])
    if asked or given not in [[each] for each in SHELLS]:
        (sys.stdout if asked else sys.stderr).write(f"{__doc__}\n")
        return 0 if asked else 2
    sys.stdout.write(completion(given[0], commands))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
