"""Options of every command: `name=value` as settings are, `--name value`, and what is misspelled."""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from toolrl import commands as around
from toolrl.cli import COMMANDS, OPTIONS
from verl.config.commands import SFT, Command
from verl.config.show import described
from verl.host.arguments import Arguments
from verl.trainer import cli
from verl.trainer.cli import CliArgs, run_cli

SETTINGS = {each.name: each for each in (SFT, *vars(around).values()) if isinstance(each, Command)}
PARSED = sorted({*COMMANDS} - {*SETTINGS, "preflight", "completion"})
TYPED = {"--max-timeout-s": "2.5", "--lease-s": "2.5", "--idle-s": "2.5", "--max-images-gib": "2.5"}


def parser_of(command: str) -> Arguments:
    """Its module must need nothing that is slow or not installed."""
    module = COMMANDS[command].module
    if importlib.util.find_spec(module).submodule_search_locations:  # type: ignore[union-attr]
        module = f"{module}.__main__"
    parser = importlib.import_module(module).arguments()
    assert isinstance(parser, Arguments) and parser.prog == f"toolrl {command}"
    return parser


def value_of(action: argparse.Action) -> str:
    """A value that the option takes."""
    if action.choices:
        return str(next(reversed([*action.choices])))
    name = (action.option_strings or [action.dest])[-1]
    if name in TYPED:
        return TYPED[name]
    if "option" in name:
        return "key=1"
    return "7" if action.type is not None and action.type is not Path else "some/text"


def needed(parser: Arguments, but: str = "") -> dict[str, str]:
    """{option: value} of what the command cannot do without."""
    options = parser.options().items()
    return {name: value_of(action) for name, action in options if action.required and name != but}


def dashed(parser: Arguments, name: str, value: str) -> list[str]:
    (action,) = (each for option, each in parser.options().items() if option == name)
    return [*action.option_strings[-1:], value]


def each_option() -> list[tuple[str, str]]:
    return [(command, name) for command in PARSED for name in parser_of(command).options() if name != "help"]


@pytest.mark.parametrize("command", PARSED)
def test_the_completion_offers_every_option(command: str) -> None:
    found = parser_of(command).options().items()
    named = {name: action for name, action in found if action.option_strings and name != "help"}
    expected = [action.option_strings[-1] if action.nargs == 0 else f"{name}=" for name, action in named.items()]
    assert OPTIONS.get(command, "").split() == expected


@pytest.mark.parametrize(("command", "name"), each_option())
def test_every_option_has_both_spellings(command: str, name: str) -> None:
    parser = parser_of(command)
    action, rest = parser.options()[name], needed(parser, but=name)
    others = [word for option, value in rest.items() for word in dashed(parser, option, value)]
    plain = parser.read(others) if not action.required else None
    if action.nargs == 0:
        spellings = [[f"--{name.replace('_', '-')}"], [f"{name}=true"], [f"--{name}=true"]]
        assert plain is not None and parser.read([*others, f"{name}=false"]) == plain
    else:
        value = value_of(action)
        spellings = [[f"{name}={value}"], [f"{name.replace('_', '-')}={value}"], [f"--{name}={value}"]]
        if action.option_strings:
            spellings += [[f"{action.option_strings[-1]}={value}"], [action.option_strings[-1], value]]
    read = [parser.read([*each, *(f"{option}={value}" for option, value in rest.items())]) for each in spellings]
    read += [parser.read([*others, *each]) for each in spellings]
    assert all(each == read[0] for each in read)
    if plain is not None:
        assert action.default == plain.__dict__[action.dest]
        assert value_of(action) == str(action.default) or read[0] != plain


@pytest.mark.parametrize(("command", "name"), each_option())
def test_a_misspelled_option_is_one_line_with_the_nearest(
    command: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = parser_of(command)
    wrong = f"{name}x"
    for word, right in ((f"{wrong}=7", name), (f"--{wrong.replace('_', '-')}=7", f"--{name.replace('_', '-')}")):
        with pytest.raises(SystemExit) as end:
            parser.read([word, *(f"{option}={value}" for option, value in needed(parser).items())])
        assert end.value.code == 2
        wrong_word = word.partition("=")[0]
        assert capsys.readouterr().err == (
            f"toolrl {command}: unknown option {wrong_word!r}; did you mean {right!r}? "
            f"(toolrl {command} --help lists all options)\n"
        )


@pytest.mark.parametrize(
    ("command", "line", "message"),
    [
        ("serve", "run port=x", "argument --port: invalid int value: 'x'"),
        ("serve", "run no_token=maybe", "no_token=maybe: expected no_token=true or no_token=false"),
        ("serve", "port=8001", "the following arguments are required: RUN"),
        ("serve", "run --port", "--port needs a value: port=.."),
        ("serve", "run zzz=1", "unknown option 'zzz'; known: api_key"),
        ("serve", "run -p 8001", "unrecognized arguments: -p"),
        ("explain", "run", "the following arguments are required: --step"),
        ("replay", "run step=0", "argument --step: '0' is not a whole number of at least 1"),
        ("metrics", "gpu", "unrecognized arguments: gpu"),
        ("export", "run out=x format=onnx", "argument --format: invalid choice: 'onnx'"),
    ],
)
def test_unusable_arguments_are_a_one_line_error(
    command: str, line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parser_of(command).read(shlex.split(line))
    output = capsys.readouterr().err
    assert end.value.code == 2 and output.startswith(f"toolrl {command}: {message}") and output.count("\n") == 1


def test_positional_arguments_keep_their_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    push, report = parser_of("push"), parser_of("report")
    for line in ("run me/name", "model=run me/name", "repository=me/name run", "private=false run repository=me/name"):
        given = push.read(line.split())
        assert (given.model, given.repository, given.private) == ("run", "me/name", False)
    for line in ("a b out=page", "out=page runs=[a,b]", "a --out page b"):
        given = report.read(line.split())
        assert (given.runs, given.out) == ([Path("a"), Path("b")], Path("page"))
    monkeypatch.chdir(tmp_path)
    Path("lr=0.1").mkdir()
    Path("png=1").mkdir()
    assert report.read(["lr=0.1"]).runs == [Path("lr=0.1")] and report.read(["./png=1"]).runs == [Path("png=1")]
    given = push.read(["run", "me/name", "results=[a.md, b.md]", "--results", "c.md", "option=a=b"])
    assert given.results == [Path("a.md"), Path("b.md"), Path("c.md")] and given.option == [("a", "b")]


@pytest.mark.parametrize("command", SETTINGS)
def test_every_setting_has_both_spellings(command: str) -> None:
    for key, *_ in described(SETTINGS[command]):
        assert cli._parse([f"--{key}=1", "--data=x"], ()) == cli._parse([f"{key}=1", "data=x"], ())


OF_SETTINGS = {"plan": ("--gpu=",), "lab": ("--step=", "--show="), "train": ("--preflight",), "eval": ("--probe",)}


@pytest.mark.parametrize(
    ("command", "spellings", "options"),
    [
        ("plan", ("--gpu=h100", "--gpu h100", "gpu=h100"), ["--gpu=h100"]),
        ("lab", ("--show=3", "--show 3", "show=3"), ["--show=3"]),
        ("lab", ("--step=3", "--step 3", "step=3"), ["--step=3"]),
        ("train", ("--preflight", "--preflight=true", "preflight=true"), ["--preflight"]),
        ("train", ("--preflight=false", "preflight=false", "rollout.n=2"), []),
        ("eval", ("--probe", "probe=true"), ["--probe"]),
    ],
)
def test_options_of_commands_with_settings(command: str, spellings: Sequence[str], options: list[str]) -> None:
    given: list[Any] = []

    def run(args: CliArgs, console: Console) -> None:
        given.append(args.options)

    for each in spellings:
        assert run_cli(shlex.split(each), "", SETTINGS[command], run, OF_SETTINGS[command]) == 0
    assert given == [options] * len(spellings)


@pytest.mark.parametrize(
    ("command", "line", "message"),
    [
        ("plan", "gpi=h100", "unknown option 'gpi'; did you mean 'gpu'?"),
        ("plan", "--gpi=h100", "unknown option '--gpi'; did you mean '--gpu'?"),
        ("lab", "sho=3", "unknown option 'sho'; did you mean 'show'?"),
        ("train", "--preflght", "unknown option '--preflght'; did you mean '--preflight'?"),
        ("train", "preflight=maybe", "preflight=maybe: expected preflight=true or preflight=false"),
        ("chat", "modl=x", "unknown option 'modl'; did you mean 'model'?"),
        ("train", "recip=grpo", "unknown option 'recip'; did you mean 'recipe'?"),
        ("train", "--data rows.jsonl", "write data=.., without a blank"),
        ("train", "--rollout.m=8", "unknown key 'rollout.m'"),
        ("train", "cfg=all", "--cfg takes one value: --cfg job"),
        ("train", "--config", "--config needs a value: config=.."),
    ],
)
def test_impossible_settings_and_options_are_a_one_line_error(
    command: str, line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(shlex.split(line), "", SETTINGS[command], lambda *_: 0, OF_SETTINGS.get(command, ())) == 2
    output = capsys.readouterr().out
    assert output.startswith(f"ConfigError: {message}") and output.count("\n") == 1
