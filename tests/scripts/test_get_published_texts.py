"""Fetching the systems' texts, from a local server with files of the same structure."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from scripts import get_published_texts
from scripts.get_published_texts import FILES, TEXTS, Source, digest_like, main
from verl.formats.prompt import load_template

SERVED = {  # by the last part of the path
    "nq_search.py": 'def make_prefix(dp):\n    prefix = f"""Find. \\\nQuestion: {question}\\n"""\n',
    "generation.py": "def loop(obs):\n    obs.append(f'\\nMy previous action is invalid. \\\nTry again.\\n')\n",
    "rl_dataset.py": "tir_base_0309 = 'User: [PROMPT]\\nAssistant:\\n'\n",
    "prompt_template.json": json.dumps({"retool": "Solve \\boxed{{x}}:\n{query}\n"}),
    "my_evaluation.py": "T = {'orz_tir': '{input} in \\\\boxed{} <think>', 'other': 'x'}\nimport os\n",
    "verl_toolcall_preprocess.py": "qwen_tool_prompts = 'Tools: {tools}, such as {{1}}'\n",
    "train.parquet": "rows",
    "test.parquet": "rows",
    "system_prompt.j2": "You are it.\n",
    "fn_call_converter.py": (
        "SYSTEM_PROMPT_SUFFIX_TEMPLATE = '\\nFunctions:\\n{description}\\n'\n"
        "IN_CONTEXT_LEARNING_EXAMPLE_PREFIX = '\\nExample.\\n'.lstrip()\n"
        "IN_CONTEXT_LEARNING_EXAMPLE_SUFFIX = '\\nEnd.\\n'\n"
    ),
    "utils.py": (
        "def get_instruction(instance):\n    instruction = f'In /workspace/{workspace_dir_name}, {workspace_dir_name}:"
        ' {instance.problem_statement} at {instance["base_commit"]}\'\n'
    ),
    "function_calling.py": """
_BASH = \"\"\"Run it.\\n* Often.\\n\"\"\"
CmdRunTool = ToolParam(type='function', function=ChatCompletionToolParamFunctionChunk(
    name='execute_bash', description=_BASH,
    parameters={'type': 'object', 'properties': {'command': {'type': 'string'}}, 'required': ['command']},
))
WebTool = ToolParam(function=ChatCompletionToolParamFunctionChunk(name='web', description=f'{CmdRunTool}'))
FinishTool = ToolParam(function=ChatCompletionToolParamFunctionChunk(name='finish', description='End.'))
""",
    "rlla_qwen.py": r"""
json_string = "{}"
SYS = "Tools: {tools}, as {json_string}\n"
def _format_prompt(message):
    USER_PROMPT = "**Dialogue Records History**\n"
    USER_PROMPT += f"<user> {message['content'].strip()}\nUse the one or more tools. </user>\n"
    USER_PROMPT += f"<user> {message['content'].strip()}\nIf there's no appropriate tools, stop. </user>\n"
    USER_PROMPT += f"<obs> Tool {tool_name}. Execution returns: {tool_result} </obs>\n"
    USER_PROMPT += f"\n<user> If you think so, respond. </user>\n"
""",
}
TOOLRL_BFCL = """Tools: {{tools}}, as {{}}
**Dialogue Records History**
<user> {{question}}
{} </user>
<obs> Tool {{tool}}. Execution returns: {{result}} </obs>

<user> If you think so, respond. </user>
"""
MADE = {
    "search_r1.txt": "Find. Question: {question}\n",
    "search_r1_invalid.txt": "My previous action is invalid. Try again.",
    "torl.txt": "User: {question}\nAssistant:\n",
    "retool.txt": "Solve \\boxed{x}:\n{question}\n",
    "zerotir.txt": "{question} in \\boxed{} <think>",
    "tool_n1.txt": "Tools: {tools}, such as {1}",
    "openhands.txt": "You are it.\nFunctions:\n{tools}\n",
    "skyrl_tools.json": json.dumps(
        [
            {
                "type": "function",
                "function": {
                    "name": "execute_bash",
                    "description": "Run it.\n* Often.\n",
                    "parameters": {
                        "type": "object",
                        "properties": {"command": {"type": "string"}},
                        "required": ["command"],
                    },
                },
            },
            {"type": "function", "function": {"name": "finish", "description": "End."}},
        ],
        indent=2,
    )
    + "\n",
    "toolrl.txt": "Tools: {tools}, as {}\n",
    "toolrl_bfcl.txt": TOOLRL_BFCL.format("If there's no appropriate tools, stop."),
    "toolrl_bfcl_multi_turn.txt": TOOLRL_BFCL.format("Use the one or more tools."),
    "skyrl.txt": "Example.\nIn /testbed, testbed: {question} at HEAD\nEnd.\n",
}


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server of these files, under hashes of their own."""

    def served(source: Source) -> Source:
        content = SERVED[source.path.rpartition("/")[2]].encode()
        path = tmp_path / "served" / source.repository / source.commit / source.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return replace(source, digest=digest_like(source.digest, content))

    texts = {name: replace(text, sources=tuple(map(served, text.sources))) for name, text in TEXTS.items()}
    monkeypatch.setattr(get_published_texts, "TEXTS", texts)
    monkeypatch.setattr(get_published_texts, "FILES", {name: served(source) for name, source in FILES.items()})
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "served"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_texts_are_files_that_the_formats_take_verbatim(base: str, tmp_path: Path) -> None:
    assert main(["--base", base, "--out", str(tmp_path / "out")]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*MADE, *FILES} == {*TEXTS, *FILES}
    for name, text in MADE.items():
        assert (tmp_path / "out" / name).read_text() == text == load_template(str(tmp_path / "out" / name), "").text
    assert (tmp_path / "out" / "torl_test.parquet").read_bytes() == b"rows"


def test_another_file_and_a_missing_server_are_refused(
    base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (changed,) = (tmp_path / "served").rglob("prompt_template.json")
    changed.write_text("{}")
    assert main(["--base", base, "--out", str(tmp_path / "out"), "--only", "retool.txt"]) == 2
    assert "has the digest" in capsys.readouterr().err and not (tmp_path / "out" / "retool.txt").exists()
    assert main(["--base", f"{base}/none", "--out", str(tmp_path / "out"), "--only", "torl.txt"]) == 2
    assert main(["--base", "nowhere", "--out", str(tmp_path / "out"), "--only", "torl.txt"]) == 2
    assert capsys.readouterr().err.count("cannot be fetched") == 2


def test_every_pin_is_a_whole_commit_and_digest() -> None:
    for source in (*FILES.values(), *(source for text in TEXTS.values() for source in text.sources)):
        assert len(source.commit) == 40 and len(source.digest) in (40, 64)


def test_a_digest_of_git_is_that_of_git_itself(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"rows\n\0")
    made = subprocess.run(["git", "hash-object", "file"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert digest_like("0" * 40, b"rows\n\0") == made.stdout.strip()
