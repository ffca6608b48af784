"""The documentation works: every fenced block of README and docs runs, or has its settings resolved; every setting,
page and message that they name exists; and the text is easy to read.

A comment before a block has more about it:

    <!-- file: NAME -->      the block is a file, which later blocks of the quickstarts use
    <!-- needs: WHAT -->     it needs a GPU, a cluster, a network, a service ..: its settings and imports are checked
    <!-- slow: WHY -->       the same; a slow test runs it, or one that it names
"""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import yaml

from bench.gpu.measurements import SESSIONS, measured
from scripts import check_prose, pages
from tests.conftest import ROOT
from tests.support.metric_names import known as is_metric
from toolrl.cli import COMMANDS
from toolrl.commands import CHAT, EVAL, GENERATE, LAB, PLAN, PROBE
from toolrl.reward_score.rubric import read_rubric
from verl.config.commands import SFT, TRAIN, Command
from verl.config.load import RECIPES, known_keys, load_config
from verl.data.tasks import TaskSet, to_task
from verl.envs.registry import ENVS
from verl.errors import ConfigError
from verl.formats.base import TOOL_CALL_FORMATS
from verl.host.packages import OURS
from verl.plugins import TOOLS
from verl.registry import resolve
from verl.tracking.names import METRICS
from verl.types import Message, ToolCall
from verl.utils.reward_score.base import REWARDS
from verl.verl_compat.metric_names import ABSENT, COMPUTED, EQUAL, RENAMED
from verl.verl_compat.verl_keys import vocabulary

PAGES = check_prose.pages()
QUICKSTARTS = sorted((ROOT / "docs" / "quickstart").glob("*.md"))
NEEDS = (
    "a cluster",
    "a wheel and a package index",
    "another environment",
    "bubblewrap",
    "gpu",
    "hub",
    "network",
    "service",
)
MARK = r"(?:<!-- (file|needs|slow): ([^\n]*) -->\n)?"
BLOCK = re.compile(rf"^{MARK}( *)```(\S*)\n(.*?)^\3```$", re.MULTILINE | re.DOTALL)
PLACEHOLDER = re.compile(r"\.\.\.?|.*=\.\.")  # what the reader fills in
# Other projects' commands: their arguments are not ours to check.
EXTERNAL = ("apt-get", "curl", "docker", "export", "kubectl", "pip", "ray", "sbatch", "scp")
SETTINGS: Mapping[str, Command] = {
    **{each.name: each for each in (TRAIN, PLAN, SFT, GENERATE, CHAT, EVAL, PROBE, LAB)},
    "preflight": TRAIN,
}
OPTIONS = {"chat": ["--tools"], "lab": ["--step", "--show"]}  # of single commands
FAST = ("python make_rows.py", "toolrl lab")  # commands that run here, and take seconds
SLOW = ("toolrl preflight",)  # half a minute each


class PageError(AssertionError):
    """A block that is wrong: its place and the reason."""


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    mark: str  # file, needs, slow or none
    value: str  # what follows the mark
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def filename(self) -> str:
        """The file that the block is: by its mark, or by its first line."""
        named = re.match(r"# (\S+\.py)\n", self.code)
        return self.value if self.mark == "file" else named[1] if named and self.language == "python" else ""

    def commands(self) -> list[list[str]]:
        """Arguments of each command, without comments and without the environment variables before it."""
        commands = []
        for line in re.sub(r"\\\n", " ", self.code).splitlines():
            for command in re.split(r"\s&&\s", line):
                argv = shlex.split(command, comments=True)
                while argv and re.fullmatch(r"[A-Z_]+=.*", argv[0]):
                    argv = argv[1:]
                commands += [argv] if argv else []
        return commands


def blocks_of(text: str, page: str) -> list[Block]:
    """All blocks of a page."""
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[1] or "", found[2] or "", found[4], found[5])
        for found in BLOCK.finditer(text)
    ]


@cache
def all_blocks() -> tuple[Block, ...]:
    return tuple(each for page in PAGES for each in blocks_of(page.read_text(), str(page.relative_to(ROOT))))


def named(*languages: str) -> list[Any]:
    return [pytest.param(each, id=str(each)) for each in all_blocks() if each.language in languages]


def checked(block: Block) -> None:
    """Raises PageError for a block that cannot work as the page has it."""
    if block.mark == "needs" and block.value not in NEEDS:
        raise PageError(f"{block}: needs {block.value!r}; known: {', '.join(NEEDS)}")
    try:
        CHECKS[block.language](block)
    except KeyError as error:
        raise PageError(f"{block}: the kind {error} is unknown; known: {', '.join(CHECKS)}") from error
    except (ConfigError, SyntaxError, ValueError, ImportError) as error:
        raise PageError(f"{block}: {error}") from error


def check_shell(block: Block) -> None:
    for argv in block.commands():
        check_command(argv, block.mark)


def check_command(argv: Sequence[str], mark: str) -> None:
    """Raises ConfigError for an unknown command, script, option or setting."""
    name, *rest = argv
    if name == "toolrl":
        check_toolrl(*rest)
    elif name in ("bash", "source"):
        check_script(rest[0], rest[1:])
    elif name == "python":
        check_python(rest)
    elif name == "pytest":
        check_pytest(rest)
    elif name not in EXTERNAL:
        raise ConfigError(f"unknown command {name!r}")
    elif name != "export" and mark != "needs":
        raise ConfigError(f"{name} is another project's command: mark the block with what it needs")


def check_toolrl(name: str = "--help", *arguments: str) -> None:
    if name in ("--help", "--version"):
        return
    if name not in COMMANDS:
        raise ConfigError(f"unknown command 'toolrl {name}'")
    own, theirs = _parted(arguments)
    options = [each.partition("=")[0] for each in own if each.startswith("--")]
    if name in SETTINGS:
        known = ("--help", "--config", "--user-code", "--cfg", "--preflight", "--gpu", *OPTIONS.get(name, ()))
        settings = [each for each in arguments if not each.startswith("--") and each != "job"]
        settings = settings[1:] if name == "chat" and "=" not in settings[0] else settings  # the folder of a run
        load_config([each for each in settings if not PLACEHOLDER.fullmatch(each)], SETTINGS[name])
    else:
        known = help_of(name)
    if missing := [each for each in options if each not in known]:
        raise ConfigError(f"toolrl {name} has no option {missing[0]}")
    if missing := [each for each in theirs if each.startswith("--") and each not in vllms_options()]:
        raise ConfigError(f"vLLM has no option {missing[0]}")


def _parted(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """(those before `--`, those after it, which go to vLLM)"""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:place], arguments[place + 1 :]


@cache
def vllms_options() -> frozenset[str]:
    """Of its server, by its sources: an import takes ten seconds."""
    (folder,) = importlib.util.find_spec("vllm").submodule_search_locations  # type: ignore[union-attr,misc]
    sources = [Path(folder) / "engine" / "arg_utils.py", *Path(folder, "entrypoints").rglob("*cli_args.py")]
    names = re.findall(r"^    (\w+): ", "".join(each.read_text() for each in sources), re.MULTILINE)
    return frozenset(f"--{each.replace('_', '-')}" for each in names)


@cache
def help_of(name: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "toolrl", name, "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def check_script(path: str, arguments: Sequence[str]) -> None:
    if path not in ("train_grpo.sh", "train_ppo.sh", ".ci/run") and not path.startswith(("scripts/", "bench/")):
        raise ConfigError(f"{path} is no script of the project")
    if not (ROOT / path).is_file():
        raise ConfigError(f"there is no script {path}")
    settings = [re.sub(r"^([\w.]+=[^\[{,]*),[^\[]*$", r"\1", each) for each in arguments if "=" in each]
    if path == "scripts/test.sh":
        check_pytest(arguments)
    elif path.startswith(("train_", "scripts/learn_")):
        recipe = Path(path).stem.replace("train_", "toolrl_")
        load_config([f"recipe={recipe}", "model.path=any", "data.train_files=[any]", *settings])
    elif path == "scripts/sweep.sh":
        load_config(settings)  # the first point
    elif settings:
        raise ConfigError(f"{path}: its settings are not checked: {settings}")


def check_python(argv: Sequence[str]) -> None:
    path, *arguments = argv
    if path == "-m":
        if arguments[0] not in ("build", "toolrl"):
            raise ConfigError(f"docs name toolrl's commands, not the module {arguments[0]}")
        return
    if path in quickstart_files():
        source = quickstart_files()[path]
    elif (ROOT / path).is_file():
        source = "".join(each.read_text() for each in (ROOT / path).parent.glob("*.py"))  # some share their options
    else:
        raise ConfigError(f"there is no script {path}")
    for option in (each.partition("=")[0] for each in arguments if each.startswith("--")):
        if f'"{option}"' not in source:
            raise ConfigError(f"{path} has no option {option}")


def check_pytest(argv: Sequence[str]) -> None:
    declared = (ROOT / "pyproject.toml").read_text() + (ROOT / "tests" / "chaos" / "results.py").read_text()
    for before, word in zip(["", *argv], argv, strict=False):
        if before == "-m" and f'"{word}: ' not in declared:
            raise ConfigError(f"there is no marker {word}")
        if word.startswith("--") and f'"{word}"' not in declared:
            raise ConfigError(f"pytest has no option {word} here")


def check_source(block: Block) -> None:
    """It compiles, and what it imports exists. Blocks without needs run in a test of their own."""
    tree = ast.parse(block.code)
    if block.value == "another environment":  # its packages are not here
        return
    imports = [each for each in ast.walk(tree) if isinstance(each, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), str(block), "exec"), {})


def check_json(block: Block) -> None:
    for line in block.code.splitlines():
        json.loads(line)


def check_yaml(block: Block) -> None:
    entries = yaml.safe_load(block.code)
    unknown = [each["name"] for each in entries if each["name"] not in TOOLS]
    if unknown:
        raise ConfigError(f"unknown tool {unknown[0]!r}")


def check_mermaid(block: Block) -> None:
    head, *lines = block.code.splitlines()
    pairs = [(line.count(opening), line.count(closing)) for line in lines for opening, closing in ("[]", "{}", "()")]
    if head.split()[0] != "flowchart" or any(opened != closed for opened, closed in pairs):
        raise ConfigError("no flowchart, or its brackets do not match")


def check_rubric(block: Block) -> None:
    """A file of TOML is the rubric of a judge."""
    with NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(block.code)
        file.flush()
        read_rubric(file.name)


def check_text(block: Block) -> None:
    """Output and pictures: no command hides in them from the tests."""
    hidden = [line for line in block.code.splitlines() if re.match(r"(toolrl|bash|python|pip|pytest) ", line)]
    if hidden:
        raise ConfigError(f"a command in a block of text: {hidden[0]}")


CHECKS: Mapping[str, Callable[[Block], None]] = {
    "bash": check_shell,
    "python": check_source,
    "json": check_json,
    "yaml": check_yaml,
    "mermaid": check_mermaid,
    "toml": check_rubric,
    "text": check_text,
}


@cache
def quickstart_files() -> Mapping[str, str]:
    """The files that the quickstarts' blocks are, by name."""
    files: dict[str, str] = {}
    for block in (each for each in all_blocks() if each.page.startswith("docs/quickstart/") and each.filename):
        assert files.setdefault(block.filename, block.code) == block.code, f"two files {block.filename}"
    return files


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all files of the quickstarts, which is the working folder."""
    for name, code in quickstart_files().items():
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(argv: Sequence[str], folder: Path) -> str:
    """The output of a command of the docs, which must succeed."""
    command = {"toolrl": ["-m", "toolrl"], "python": []}[argv[0]]
    done = subprocess.run(
        [sys.executable, *command, *argv[1:]],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("block", named(*{each.language for each in all_blocks()}))
def test_a_block_can_work(block: Block) -> None:
    checked(block)


@pytest.mark.parametrize("block", [each for each in named("python") if each.values[0].mark == ""])
def test_python_runs(block: Block, desk: Path) -> None:
    exec(compile(block.code, str(block), "exec"), {"__name__": "__main__"})


def commands_with(prefixes: Sequence[str]) -> list[Any]:
    return [
        pytest.param(argv, id=f"{block}-{' '.join(argv[:2])}")
        for block in all_blocks()
        if block.language == "bash" and block.mark == ""
        for argv in block.commands()
        if any(" ".join(argv).startswith(each) for each in prefixes)
    ]


def at_desk(argv: Sequence[str], desk: Path) -> list[str]:
    return [str(ROOT / each) if (ROOT / each).is_file() else each for each in argv]


@pytest.mark.parametrize("argv", commands_with(FAST))
def test_a_quick_command_runs(argv: list[str], desk: Path) -> None:
    run(at_desk(argv, desk), desk)


@pytest.mark.slow
@pytest.mark.parametrize("argv", commands_with(SLOW))
def test_a_slow_command_runs(argv: list[str], desk: Path) -> None:
    run([*at_desk(argv, desk), "rollout.name=hf", "trainer.device=cpu"], desk)


def quickstart_commands() -> list[Any]:
    return [
        pytest.param(argv[2:], id=Path(block.page).stem)
        for block in all_blocks()
        if block.page.startswith("docs/quickstart/")
        for argv in (block.commands() if block.language == "bash" else [])
        if argv[:2] == ["toolrl", "train"]
    ]


@pytest.mark.parametrize("settings", quickstart_commands())
def test_files_named_by_a_quickstart_exist(settings: list[str], desk: Path) -> None:
    """Its files exist and its rows are tasks; rewards, tools, formats and environments resolve."""
    config = load_config(settings)
    if "make_rows.py" in quickstart_files() and "calls.jsonl" in str(config.data.train_files):
        run(["python", "make_rows.py"], desk)
    for file in config.data.train_files:
        if file.endswith(".jsonl"):
            tasks = TaskSet(file)
            assert len(tasks) == len({task.prompt for task in tasks})
    resolve("reward", config.reward.name, REWARDS)
    if config.env.name != "tool":
        resolve("environment", config.env.name, ENVS)
    for each in config.env.tools:
        resolve("tool", each, TOOLS)
    if config.env.tool_call_format:
        resolve("tool-call format", config.env.tool_call_format, TOOL_CALL_FORMATS)


@pytest.mark.slow
@pytest.mark.parametrize("settings", quickstart_commands())
def test_a_quickstart_passes_the_preflight_on_the_embedded_model(settings: list[str], desk: Path) -> None:
    """The same settings, but for what that model cannot do: its template lists no tools, its context is short."""
    run(["python", "make_rows.py"], desk)
    small = [each for each in settings if not each.startswith(("model.path=", "model=Q", "trainer.total"))]
    small = [each.replace("tool_call_format=hermes", "tool_call_format=toolrl") for each in small]
    if "recipe=mini_grpo" not in small and "model=embedded" not in small:
        small += ["data.max_prompt_length=800", "data.max_response_length=128", "model.compute_dtype=float32"]
        small += ["model.path=embedded:model"]
    run(["toolrl", "preflight", *small, "rollout.name=hf", "trainer.device=cpu"], desk)


def test_the_quickstart_reward_tool_and_format_work_as_documented(desk: Path) -> None:
    made: Callable[[str], Any] = partial(resolve, "object", table={})
    gold = '<think> a </think>\n<tool_call>\n{"name": "f"}\n{"name": "g"}\n</tool_call>'
    turned = '<tool_call>\n{"name": "g"}\n{"name": "f"}\n</tool_call>'
    assert made("my_reward.py:score")(turned, gold) == {"score": 1.1, "right": 1.0, "short": 1.0}
    assert made("my_reward.py:score")("x" * 500, gold)["score"] == 0.0
    assert made("my_tools.py:rain")("Oslo") is True
    assert made("my_tools.py:right")("It does: yes.", "yes") == 1.0
    parse = made("my_format.py:CallFormat")().parse
    assert [(call.name, call.arguments) for call in parse('Well.\nCALL rain {"city": "Oslo"}').calls] == [
        ("rain", {"city": "Oslo"})
    ]
    assert [type(parse(text)).__name__ for text in ("CALL rain", "CALL rain []x", "yes")] == [
        "ParseError",
        "ParseError",
        "Final",
    ]


def test_the_quickstarts_algorithm_compares_with_the_median(desk: Path) -> None:
    import torch

    from verl.algorithms.estimators.advantage import AdvantageInputs

    algorithm = resolve("algorithm", "my_algorithm.py:MEDIAN", {})
    rewards = [torch.tensor([0.0, 1.0]), torch.tensor([3.0]), torch.tensor([8.0])]
    made = algorithm.advantage(AdvantageInputs(rewards, torch.tensor([5, 5, 5])))
    assert [each.tolist() for each in made.advantages] == [[-2.0, -2.0], [0.0], [5.0]]


def test_the_quickstarts_environment_is_won_by_the_number(desk: Path) -> None:
    task = to_task(json.loads(Path("numbers.jsonl").read_text()), "numbers.jsonl#0")

    async def play(*numbers: Any) -> tuple[list[str], bool, float]:
        env = resolve("environment", "guess.py:GuessEnv", {})(task)
        assert (await env.reset()).tools[0].name == "guess"
        calls = tuple(ToolCall("guess", {"number": each}) for each in numbers)
        done = await env.step(Message("assistant", "", calls))
        score = await env.judge()
        await env.close()
        return [each.content for each in done.messages], done.done, score.total

    assert asyncio.run(play(50, 20, "x")) == (["lower", "higher", "Error: number must be an integer"], False, 0.0)
    assert asyncio.run(play(1, 42)) == (["higher", "right"], True, 1.0)
    assert asyncio.run(play()) == ([], True, 0.0)


def block(language: str, code: str, mark: str = "", value: str = "") -> Block:
    return Block("page.md", 1, mark, value, language, code)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (block("", "x"), "the kind '' is unknown"),
        (block("fortran", "x"), "the kind 'fortran' is unknown"),
        (block("bash", "toolrl train data.train_fils=[a]"), "unknown key"),
        (block("bash", "toolrl train recipe=mini_grpo \\\n    rollout.temperature_x=2"), "unknown key"),
        (block("bash", "toolrl eval model_x=a"), "unknown key"),
        (block("bash", "toolrl trane"), "unknown command"),
        (block("bash", "toolrl lab --dta=x"), "no option --dta"),
        (block("bash", "bash scripts/none.sh"), "there is no script"),
        (block("bash", "bash train_grpo.sh actor.nothing=1"), "unknown key"),
        (block("bash", "python scripts/play.py shop --nope"), "no option --nope"),
        (block("bash", "python -m verl.trainer.main_ppo"), "not the module"),
        (block("bash", "pytest -m nothing"), "no marker"),
        (block("bash", "ray start --head"), "mark the block"),
        (block("bash", "toolrl train a.b=1", "needs", "gpu"), "unknown key"),
        (block("bash", "toolrl doctor", "needs", "luck"), "needs 'luck'"),
        (block("python", "import verl.nothing"), "No module named"),
        (block("python", "from verl.types import Nothing"), "cannot import name"),
        (block("python", "from verl.types import Nothing", "needs", "gpu"), "cannot import name"),
        (block("python", "x ="), "invalid syntax"),
        (block("json", "{"), "Expecting"),
        (block("yaml", "- {name: hammer}"), "unknown tool"),
        (block("mermaid", "flowchart LR\n    a[b --> c"), "brackets"),
        (block("text", "toolrl train"), "a command in a block of text"),
    ],
)
def test_a_bad_block_fails(bad: Block, reason: str) -> None:
    with pytest.raises(PageError, match=re.escape(reason)):
        checked(bad)


def test_every_fence_is_a_block() -> None:
    """None is overlooked because of how it is written."""
    for page in PAGES:
        text = page.read_text()
        assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(blocks_of(text, "")), page


GROUPS = "algorithm|actor|critic|data|env|eval|model|ref|reward|rollout|sandbox|trainer|actor_rollout_ref"
KEY = re.compile(rf"(?:{GROUPS})\.[a-z_]+(?:\.[a-z_]+)*")


def keys_in(text: str) -> set[str]:
    """Settings in inline code, complete ones; `name.*` and file names are not."""
    text = BLOCK.sub("", text)
    codes = [each for code in re.findall(r"`([^`\n]+)`", text) for each in re.split(r"[ ,]+", code)]
    found = {each.partition("=")[0] for each in codes}
    return {each for each in found if KEY.fullmatch(each) and not each.endswith((".py", ".md", ".json", ".jsonl"))}


@cache
def every_key() -> tuple[str, ...]:
    ours = known_keys()
    theirs = [name for key in vocabulary() for name in (key, key.removeprefix("actor_rollout_ref."))]
    return (*ours, *theirs, *(f"actor_rollout_ref.{key}" for key in ours))


def is_key(key: str) -> bool:
    known = every_key()
    return any(each in (key, f"{key}.") or each.startswith(f"{key}.") for each in known) or any(
        each.endswith(".") and key.startswith(each) for each in known
    )


def test_an_unknown_setting_in_a_text_is_found() -> None:
    assert keys_in("`rollout.nn=3`, `data.max_bad_share`, `trainer.py`, see rollout.foo") == {
        "rollout.nn",
        "data.max_bad_share",
    }
    assert not is_key("rollout.nn")
    assert is_key("data.max_bad_share") and is_key("algorithm.options.tau_pos") and is_key("algorithm.correction")


METRIC = re.compile(rf"`((?:{'|'.join(sorted({each.name.partition('/')[0] for each in METRICS}))})/[a-z_/]+)`")


VERL = {each.name for each in (*RENAMED, *COMPUTED, *EQUAL, *ABSENT)}


def unknown_metrics(text: str) -> list[str]:
    return sorted({each for each in METRIC.findall(BLOCK.sub("", text)) if not is_metric(each)} - VERL)


def test_an_unknown_metric_in_a_text_is_found() -> None:
    assert unknown_metrics("`tools/nothing`, `actor/entropy`, `actor/entropi`") == ["actor/entropi", "tools/nothing"]


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and mkdocs make it."""
    return re.sub(r"[ ]", "-", re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()))


def anchors(page: Path) -> set[str]:
    return {slug(each) for each in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)}


def broken_links(page: Path) -> list[str]:
    """Relative links to missing files and headings."""
    problems = []
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", BLOCK.sub("", page.read_text())):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            problems.append(target)
    return problems


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# A b\n[x](b.md) [y](#a-b) [z](#c) [w](a.md#a-b)")
    assert broken_links(tmp_path / "a.md") == ["b.md", "#c"]


def test_the_site_and_the_index_have_every_page() -> None:
    pages = {str(each.relative_to(ROOT / "docs")) for each in PAGES if ROOT / "docs" in each.parents}
    assert set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)) == pages
    listed = set(re.findall(r"\]\(([\w/]+\.md)\)", (ROOT / "docs" / "index.md").read_text()))
    assert listed | {"index.md"} == {each for each in pages if not each.startswith("recipes/")} | {"recipes/index.md"}


def test_every_recipe_is_in_the_index_of_recipes() -> None:
    rows = re.findall(r"^\| (`.+?`) \|", (ROOT / "docs" / "recipes" / "index.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == {each.stem for each in RECIPES.glob("*.yaml")}


def messages() -> set[str]:
    """All texts in the package's code, with `..` for what is filled in."""
    texts = set()
    for path in (file for package in OURS for file in package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [each.value if isinstance(each, ast.Constant) else ".." for each in node.values]
                texts.add("".join(map(str, parts)))
    return texts


def test_messages_in_troubleshooting_are_the_codes() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    tables = re.findall(r"^\| message \|.*\n\|.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    quoted = [re.match(r"\| `(.+?)` \|", row) for table in tables for row in table.splitlines()]
    assert len(quoted) >= 15
    assert all(quoted)
    known = messages()

    def is_printed(quote: str) -> bool:
        pattern = re.compile(".*".join(map(re.escape, re.split(r"\s*\.\.\s*", quote))), re.DOTALL)
        return any(pattern.search(each) for each in known)

    assert [found[1] for found in quoted if found and not is_printed(found[1])] == []
    assert not is_printed("a message .. that nothing prints")


def test_the_keys_of_the_migration_page_are_translated() -> None:
    """Each row of its short table sets the same as veRL's key does."""
    table = (ROOT / "docs" / "verl_keys.md").read_text()
    theirs = dict(re.findall(r"^\| `([\w.]+)` \| (.+) \|$", table, re.MULTILINE))
    short = (ROOT / "docs" / "migration.md").read_text().partition("| veRL | here |\n")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.+`) \| (.+) \|$", short, re.MULTILINE)
    assert len(rows) >= 10
    for left, right in rows:
        key = re.findall(r"`([\w.]+)`", left)[0]
        ours = [each.partition("=")[0] for each in re.findall(r"`([^`]+)`", right)]
        assert ours[0] in theirs[key], key


def test_the_readme_is_short_and_names_the_entry_points() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 110
    for each in (
        "bash train_grpo.sh",
        "bash scripts/test.sh",
        "preprocess_rlla.py",
        "export WITHLENGTH=1",
        "EXPERIMENT_NAME",
        "```mermaid",
    ):
        assert each in text
    (part,) = pages.PART.finditer(text)
    assert part["name"] == "on_a_gpu" and part.end() < text.index("## Train")


def gpu_rows() -> list[dict[str, Any]]:
    """Results of bench/gpu/short.py: one as expected, one not, and one that found no time."""
    facts = {"device": "NVIDIA H100 80GB HBM3", "versions": {"torch": "2.11.0"}, "rehearsal": False, "seconds": 1.0}
    return [
        {"name": "ceilings", "state": "ok", "reason": None, "figures": {"a copy: TB/s": 3.0}, **facts},
        {
            "name": "greedy",
            "state": "failed",
            "reason": f"1 | 2 {50 * 'and more '}",
            "figures": {"shortfall: nats": None},
            **facts,
        },
        {"name": "trl", "state": "skipped", "reason": "takes about 170 s, and 20 s are left", "figures": {}, **facts},
    ]


def test_the_pages_state_what_ran_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the results, as far as there are any. Rehearsals are none."""
    monkeypatch.setattr(pages, "ASSET", tmp_path / "gpu.json")
    assert pages.on_a_gpu().startswith("**Not yet run on a GPU**: ")
    assert pages.gpu().count("| not yet run |") == len(measured(SESSIONS))
    results = tmp_path / "results.jsonl"
    command = [sys.executable, "bench/gpu/table.py", results, "--json", tmp_path / "gpu.json"]
    for rows, complaint in (
        ([], "no results"),
        ([row | {"rehearsal": True} for row in gpu_rows()], "of a rehearsal"),
        ([gpu_rows()[0] | {"state": "failed", "reason": "x"}, *gpu_rows()], ""),
    ):
        results.write_text("".join(json.dumps(row) + "\n" for row in rows))
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert complaint in done.stderr and (done.returncode == 0) == (complaint == "")
        assert (tmp_path / "gpu.json").exists() == (complaint == "")
    total = len(measured(SESSIONS))
    assert pages.on_a_gpu().startswith(f"**Run on a GPU**: NVIDIA H100 80GB HBM3, 1 of {total} ")
    lines = pages.gpu().splitlines()
    assert sum("| not yet run |" in line for line in lines) == total - 3
    assert [line.split(" | ")[2] for line in lines if line.startswith(("| `ceilings`", "| `greedy`", "| `trl`"))] == [
        "ok |",
        r"failed: 1 \| 2 " + 9 * "and more " + "and [...] |",
        "skipped: takes about 170 s, and 20 s are left |",
        "3 |",
        "not finite |",
    ]
    assert lines[-1] == "NVIDIA H100 80GB HBM3, torch 2.11.0  "


def test_no_other_page_denies_the_gpu_measurements() -> None:
    negated = r"\b(?:not yet|never|nothing here|no version has|not been)"
    claim = re.compile(rf"{negated} (?:been )?(?:run|ran|tried|verified)\b.{{0,12}}GPU", re.IGNORECASE)
    code = (each for folder in ("verl", "toolrl", "bench", "scripts") for each in (ROOT / folder).rglob("*.py"))
    files = [*PAGES, ROOT / "tests/test_gpu.py", *code]
    found = {str(each.relative_to(ROOT)) for each in files if claim.search(" ".join(each.read_text().split()))}
    assert found <= {"README.md", "scripts/pages.py"}


def test_the_readmes_figures_are_those_of_the_committed_run() -> None:
    text = (ROOT / "README.md").read_text()
    rows = [json.loads(line) for line in (ROOT / "docs/assets/composed_grpo_metrics.jsonl").read_text().splitlines()]
    name = ""
    table = re.findall(r"^│ (\w*) +│ (\S+) +│ +([\d.]+) │ +([\d.]+) │", text, re.MULTILINE)
    for named, metric, *ends in table:
        name = named or name
        assert [f"{row[f'val/{name}/{metric}']:.3f}" for row in (rows[0], rows[-1])] == ends
    assert {named for named, *_ in table} == {"test", "test_new_tools", ""}
    for step in map(int, re.findall(r"^step (\d+)/48, reward", text, re.MULTILINE)):
        assert f"step {step}/48, reward {rows[step]['reward/total']:.3f} " in text


def test_the_curve_is_drawn_from_the_committed_metrics(tmp_path: Path) -> None:
    from scripts import draw_learning_curve

    out = tmp_path / "curve.svg"
    draw_learning_curve.draw(ROOT / "docs/assets/composed_grpo_metrics.jsonl", out)
    committed = ROOT / "docs" / "assets" / "learning_curve.svg"
    # lines and labels: another version of matplotlib may draw them differently
    drawn, there = (re.findall(r'id="((?:line2d|text)_\d+)"', each.read_text()) for each in (out, committed))
    assert drawn == there != []


def test_long_sentences_and_cells_are_found() -> None:
    filler = "word " * 50
    prose = check_prose.read_prose(f"# Head\n\n{filler}end. Short one.\n\n- An item\n  goes on.\n\n| {filler} | b |\n")
    assert [len(each) for each in prose.sentences] == [51, 2, 4]
    assert [len(each) for each in prose.cells] == [50, 1]
    assert check_prose.read_prose("```bash\nnot a text\n```\nOne `two three` [four five](x.md).").sentences == (
        ("One", "CODE", "four", "five."),
    )


PATH = re.compile(r"(?<![\w/.])(?:verl|scripts|bench|tests|docs)/[\w./-]*\w")


def missing_paths(text: str) -> list[str]:
    """Files and folders of the project that a page names and that are not there."""
    return sorted({each for each in PATH.findall(text) if not (ROOT / each).exists()})


@pytest.mark.parametrize("page", PAGES, ids=[str(each.relative_to(ROOT)) for each in PAGES])
def test_what_a_page_names_exists_and_its_text_is_easy_to_read(page: Path) -> None:
    text = page.read_text()
    problems = {
        "settings": [key for key in sorted(keys_in(text)) if not is_key(key)],
        "metrics": unknown_metrics(text),
        "links": broken_links(page),
        "files": missing_paths(text),
        "prose": check_prose.problems(page),
    }
    assert {what: found for what, found in problems.items() if found} == {}


def test_files_named_in_the_architecture_exist() -> None:
    """They are relative to the package that they belong to."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    files = re.findall(r"(?<![\w/])([a-z_]+(?:/[\w]+)*\.py)", text)
    assert len(files) > 15
    places = (*OURS, ROOT)
    assert [each for each in files if not any((place / each).exists() for place in places)] == []


def test_a_missing_file_named_in_a_text_is_found() -> None:
    assert missing_paths("`verl/types.py`, `verl/none.py`. docs/recipes/, scripts/x") == ["scripts/x", "verl/none.py"]


def test_pages_name_the_consoles_commands_and_no_modules() -> None:
    module = re.compile(r"python3? -m (?:verl|toolrl)[\w.]*|\bmain_(?:ppo|eval|sft|generation)\b")
    named = {page.name: module.findall(page.read_text()) for page in PAGES}
    assert {name: found for name, found in named.items() if found} == {
        "migration.md": ["python3 -m verl.trainer.main_ppo"],  # veRL's
        "installation.md": ["python -m toolrl"],  # where the package is not installed
        "training.md": ["python -m toolrl"],
    }
