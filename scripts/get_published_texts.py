"""Fetch the systems' own prompts, sentences and tool descriptions, as files for `data.prompt_template` and the options
of formats and environments, and ToRL's 28,740 problems.

    python scripts/get_published_texts.py                     # all of them, to dataset/published
    python scripts/get_published_texts.py --only search_r1.txt torl.txt

Every text is taken from pinned files of its system's repository, whose digests are verified. The texts belong to their
authors and stay outside this project (Search-R1, ReTool, ZeroTIR's author, Tool-N1, ToolRL and SkyRL: Apache-2.0;
OpenHands: MIT; ToRL names no license). docs/tool_call_formats.md lists where each is used.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout that is not installed, too

from verl.errors import DataError, VerlError
from verl.host.exits import write_error
from verl.host.files import replacing

BASE = "https://raw.githubusercontent.com"
TIMEOUT_S = 60.0
_SKYRL_TOOLS = ("execute_bash", "finish", "str_replace_editor")
_SKYRL_OPENHANDS = ("NovaSky-AI/SkyRL-OpenHands", "6f3ba323d8ad7d17891c1d171abc9eaf8baae252")


@dataclass(frozen=True, slots=True)
class Source:
    """A file at a commit of a repository on GitHub, with its SHA-256 or, as Git has it in that commit, its blob id."""

    repository: str
    commit: str
    path: str
    digest: str


@dataclass(frozen=True, slots=True)
class Text:
    """A text made of the contents of its sources."""

    sources: tuple[Source, ...]
    make: Callable[..., str]


def strings(source: str) -> Iterator[tuple[str, str]]:
    """(name that it is assigned to or "", text) of all strings of a Python file, f-strings with their expressions."""
    tree = ast.parse(source)
    names = {
        id(_string_of(node.value)): target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            pieces = [
                str(each.value) if isinstance(each, ast.Constant) else f"{{{ast.unparse(each.value)}}}"  # type: ignore[attr-defined]
                for each in node.values
            ]
            yield names.get(id(node), ""), "".join(pieces)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield names.get(id(node), ""), node.value


def _string_of(node: ast.expr) -> ast.expr:
    """The string of `"..".strip()`."""
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return node.func.value if called else node  # type: ignore[attr-defined]


def assigned(source: str, name: str) -> str:
    """The first string that is assigned to this name."""
    return next(text for found, text in strings(source) if found == name)


def containing(source: str, part: str) -> str:
    """The first string with this part."""
    return next(text for _, text in strings(source) if part in text)


def _zerotir(source: str) -> str:
    templates = next(node.value for node in ast.parse(source).body if isinstance(node, ast.Assign))
    return str(ast.literal_eval(templates)["orz_tir"]).replace("{input}", "{question}")


def _retool(source: str) -> str:
    return str(json.loads(source)["retool"]).format(query="{question}")


def _openhands(system: str, converter: str) -> str:
    suffix = assigned(converter, "SYSTEM_PROMPT_SUFFIX_TEMPLATE")
    return system.strip() + suffix.format(description="{tools}")


def _skyrl(instructions: str, converter: str) -> str:
    """With the folder of this project's runtimes, whose repository is at its base commit."""
    text = assigned(instructions, "instruction").replace("/workspace/{workspace_dir_name}", "/testbed")
    text = text.replace("{workspace_dir_name}", "testbed").replace("{instance['base_commit']}", "HEAD")
    text = text.replace("{instance.problem_statement}", "{question}")
    example = assigned(converter, "IN_CONTEXT_LEARNING_EXAMPLE_PREFIX").lstrip()
    return f"{example}{text}{assigned(converter, 'IN_CONTEXT_LEARNING_EXAMPLE_SUFFIX')}"


def _skyrl_tools(source: str) -> str:
    """OpenHands' schemas of the tools of SkyRL's agents, as JSON. A description may be a name of the file's."""
    texts, found = dict(strings(source)), []
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "ChatCompletionToolParamFunctionChunk":
            given = {str(each.arg): each.value for each in call.keywords}
            if ast.literal_eval(given["name"]) in _SKYRL_TOOLS:
                function = {
                    name: texts[value.id] if isinstance(value, ast.Name) else ast.literal_eval(value)
                    for name, value in given.items()
                }
                found.append({"type": "function", "function": function})
    return json.dumps(found, indent=2, ensure_ascii=False) + "\n"


def _toolrl(source: str) -> str:
    return assigned(source, "SYS").format(tools="{tools}", json_string=assigned(source, "json_string"))


def _toolrl_bfcl(source: str, turn: str) -> str:
    """The system message, a turn of the user with the sentence of this beginning, a result and what follows it."""
    heading = assigned(source, "USER_PROMPT")
    user, result, after = (containing(source, part).strip() for part in (turn, "Execution returns", "If you think"))
    user = user.replace("{message['content'].strip()}", "{question}")
    result = result.replace("{tool_name}", "{tool}").replace("{tool_result}", "{result}")
    return f"{_toolrl(source)}{heading}{user}\n{result}\n\n{after}\n"


_TORL = ("GAIR-NLP/ToRL", "cb78cf1c494c7595cf64385482918298fff5b7fb")
_SEARCH_R1 = ("PeterGriffinJin/Search-R1", "a14dc3a4ffc6fe88c1e95038d9738e21ba3f7a06")
_CONVERTER = Source(
    *_SKYRL_OPENHANDS,
    "openhands/llm/fn_call_converter.py",
    "372eb1458b7cac67ff1ca3adb09a1ad21ce56095a464e1b3cb3220b5bb9801a8",
)
_TOOLRL = Source(
    "qiancheng0/ToolRL",
    "8cee13ec0ca72f0461da372a93a6fd8140dbb840",
    "benchmarks/BFCL/rlla_qwen.py",
    "82e4b664ff7ce9cf09a4ef544a262487d2fc03fc316bd651a0232794a0fa5d34",
)
TEXTS: Mapping[str, Text] = {
    "search_r1.txt": Text(
        (
            Source(
                *_SEARCH_R1,
                "scripts/data_process/nq_search.py",
                "c1c09c2337daf204134805e502da374d11fa0dadeae8951c9bb11914c742048d",
            ),
        ),
        lambda source: assigned(source, "prefix"),
    ),
    "search_r1_invalid.txt": Text(
        (
            Source(
                *_SEARCH_R1,
                "search_r1/llm_agent/generation.py",
                "ab88b308db9d0b72fdbdd9a00f282ca28c20d3a63229a38959ce258daa1c063d",
            ),
        ),
        lambda source: containing(source, "My previous action is invalid").strip("\n"),
    ),
    "torl.txt": Text(
        (
            Source(
                *_TORL,
                "verl/utils/dataset/rl_dataset.py",
                "e6d8be18dd65ada413536e00a8717385a2c201ff3e02d0e017e55b7525b4e129",
            ),
        ),
        lambda source: assigned(source, "tir_base_0309").replace("[PROMPT]", "{question}"),
    ),
    "retool.txt": Text(
        (
            Source(
                "ReTool-RL/ReTool",
                "8407e1394dd92c1c3e61f23d6c5015c023ed7407",
                "evaluation/prompt_template.json",
                "ee91f6dcb3803181de3360f77cf271b864301e4a60933c9c4521fd3aba323535",
            ),
        ),
        _retool,
    ),
    "zerotir.txt": Text(
        (
            Source(
                "yyht/openrlhf_async_pipline",
                "d154c0a0966e45db4a76bcc80d76ee86cb03df4d",
                "evaluation/my_evaluation.py",
                "f9e1217a6a45aa575c28efcf98eb85d1eea9ba2f7844decc4b1963df9abf697b",
            ),
        ),
        _zerotir,
    ),
    "tool_n1.txt": Text(
        (
            Source(
                "NVlabs/Tool-N1",
                "f9b48492c7894dcdfeb0431def8bda24249a4e9c",
                "verl/examples/data_preprocess/verl_toolcall_preprocess.py",
                "fd967fa3f402fdfe80b7504d5deffdac7ac1e686690458b90a846b8346b56b49",
            ),
        ),
        lambda source: assigned(source, "qwen_tool_prompts").format(tools="{tools}"),
    ),
    "openhands.txt": Text(
        (
            Source(
                *_SKYRL_OPENHANDS,
                "openhands/agenthub/codeact_agent/prompts/system_prompt.j2",
                "3c81d072069448b9c6e5670697594240ac608c97bf724467e8818f7a62d99fc5",
            ),
            _CONVERTER,
        ),
        _openhands,
    ),
    "skyrl.txt": Text(
        (
            Source(
                "NovaSky-AI/SkyRL",
                "890b62a10c1ec015d014a0c0a82bbe99c3ebc60d",
                "verl/workers/agentic/swe_agent/utils.py",
                "5ea60d1f037647ee4531b6a0ae2c990f7cc67bef0058c8b6b4575a277699c345",
            ),
            _CONVERTER,
        ),
        _skyrl,
    ),
    "skyrl_tools.json": Text(
        (
            Source(
                *_SKYRL_OPENHANDS,
                "openhands/agenthub/codeact_agent/function_calling.py",
                "7c6c7a6303eeea613549c6e635703e00e90bdc593fd171e8cc1bf55ce552242b",
            ),
        ),
        _skyrl_tools,
    ),
    "toolrl.txt": Text((_TOOLRL,), _toolrl),
    "toolrl_bfcl.txt": Text((_TOOLRL,), partial(_toolrl_bfcl, turn="If there's no appropriate tools")),
    "toolrl_bfcl_multi_turn.txt": Text((_TOOLRL,), partial(_toolrl_bfcl, turn="Use the one or more")),
}


FILES: Mapping[str, Source] = {
    "torl_train.parquet": Source(*_TORL, "data/torl_data/train.parquet", "57bd7d5dd4a031913ed2573e66bebb799089f914"),
    "torl_test.parquet": Source(
        *_TORL, "data/torl_data/test.parquet", "17f263e18ebebe0ffbdceab37c10b0a4414d68430c8a18ddec23a22e7c2d6e37"
    ),
}


def digest_like(digest: str, content: bytes) -> str:
    """The content's digest of the same kind."""
    if len(digest) == hashlib.sha256().digest_size * 2:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0%b" % (len(content), content), usedforsecurity=False).hexdigest()


def fetched(base: str, source: Source) -> bytes:
    """The file. Raises DataError if it cannot be fetched or is another one."""
    url = f"{base}/{source.repository}/{source.commit}/{source.path}"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            content: bytes = response.read()
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be fetched ({error})", hint="Check the network and --base", file=url) from error
    if (found := digest_like(source.digest, content)) != source.digest:
        raise DataError(f"has the digest {found}", source.digest, "Check --base: this is another file", url)
    return content


def made(base: str, name: str) -> bytes:
    """A file of TEXTS or FILES. Raises DataError like `fetched`."""
    if name in FILES:
        return fetched(base, FILES[name])
    text = TEXTS[name]
    return text.make(*(fetched(base, source).decode() for source in text.sources)).encode()


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch and write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default=BASE, help="URL that has REPOSITORY/COMMIT/PATH below it")
    parser.add_argument("--out", default="dataset/published", help="folder")
    parser.add_argument("--only", nargs="+", choices=[*TEXTS, *FILES], default=[*TEXTS, *FILES], metavar="NAME")
    arguments = parser.parse_args(argv)
    console = Console(stderr=True, soft_wrap=True)
    try:
        for name in arguments.only:
            content, target = made(arguments.base, name), Path(arguments.out) / name
            with replacing(target) as unfinished:
                unfinished.write_bytes(content)
            console.print(escape(f"wrote {target}"))
    except VerlError as error:
        return write_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
