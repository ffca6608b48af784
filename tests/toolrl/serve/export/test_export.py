"""A model folder with its card, and its upload by the hub's own client to a stand-in of the hub."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from tests.toolrl.serve.openai_server.test_serve import SETTINGS, make_run
from toolrl.cli import main as toolrl
from toolrl.serve.export.card import model_card
from toolrl.serve.export.model_files import write_model_files
from toolrl.serve.openai_server.serving_files import CHAT_TEMPLATE, TOOL_PARSER
from verl.data.overlap import TRAIN_TASKS
from verl.lora import Lora, base_of, save_adapter

ROLLOUT = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0}


def ended(*argv: str) -> int:
    with pytest.raises(SystemExit) as end:
        toolrl(list(argv))
    return int(end.value.code or 0)


@pytest.mark.filterwarnings("ignore")
def test_a_folder_has_the_files_of_servers_and_a_card_of_the_record(tmp_path: Path) -> None:
    settings = {**SETTINGS, **{f"rollout.{key}": value for key, value in ROLLOUT.items()}}
    settings |= {"algorithm.name": "grpo", "model.path": "/home/me/base", "reward.name": "auto"}
    run = make_run(tmp_path / "run", settings)
    checkpoint = run / "checkpoints" / "step-000048"
    (checkpoint / "hf" / TRAIN_TASKS).write_text("tasks")
    state = json.loads((checkpoint / "state.json").read_text())
    after = {"val/test/total": 2.25, "val/test/total_stderr": 0.5, "val/test/exact": 0.25}
    state |= {"trainer": {"step": 48}, "before": {"val/test/total": 1.5}, "after": after}
    (checkpoint / "state.json").write_text(json.dumps(state))
    assert "| Reward | `calls` |" in model_card(checkpoint / "hf", {**state, "rewards": ["calls"]}, "toolrl")
    (tmp_path / "eval.md").write_text("| BFCL | 42.0 |\n")
    killed = subprocess.Popen(["true"])
    killed.wait()
    left = tmp_path / f".out.unfinished-{socket.gethostname()}-{killed.pid}"
    (left / "inner").mkdir(parents=True)
    assert ended("export", str(run), "--out", str(tmp_path / "out"), "--results", str(tmp_path / "eval.md")) == 0
    assert not left.exists()
    card = (tmp_path / "out" / "README.md").read_text()
    for line in (
        "| Algorithm | `grpo` |",
        "| Reward | `calls for rows with a gold turn, else by data_source` |",
        "| Initial model | `base` |",  # without the folders of this machine
        "| Tool-call format | `toolrl` |",
        "| Training data | `embedded:train.parquet` |",
        "| Learning rate | not recorded |",
        "| Steps | `48` |",
        f"| Digest of the training tasks | `sha256:{hashlib.sha256(b'tasks').hexdigest()}` |",
        "| val/test/total | 1.5 | 2.25 [1.27, 3.23] |",  # 2.25 -+ 1.96 * 0.5
        "| val/test/exact | not recorded | 0.25 |",
        "| BFCL | 42.0 |",
    ):
        assert line in card.splitlines()
    assert "In brackets: 95 % intervals over the tasks." in card and "_stderr |" not in card
    template = (tmp_path / "out" / CHAT_TEMPLATE).read_text()
    assert "Call tools or respond." in template  # the prompt of the rows
    assert 'register_tool_parser("toolrl"' in (tmp_path / "out" / TOOL_PARSER).read_text()
    sampling = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert sampling["eos_token_id"] == 2
    assert {key: sampling[key] for key in ROLLOUT} == {**ROLLOUT, "top_k": 0}


def with_adapter(run: Path, base: str) -> Path:
    """The run with an adapter of this base beside its merged copy."""
    tensors = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(4, 8)}
    save_adapter(Lora(4, 8.0, ("all-linear",)), tensors, run / "checkpoints" / "step-000048" / "adapter", base)
    return run


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_is_written_with_the_files_of_servers_and_its_base(tmp_path: Path) -> None:
    run = with_adapter(make_run(tmp_path / "run"), "/home/me/base")
    for name, arguments, base in (("own", [], "/home/me/base"), ("given", ["--base", "me/base"], "me/base")):
        out = tmp_path / name
        assert ended("export", str(run), "--format", "adapter", "--out", str(out), *arguments) == 0
        assert base_of(str(out)) == base and {"r": 4, "lora_alpha": 8}.items() <= config_of(out).items()
        names = {path.name for path in out.iterdir()}
        assert {"adapter_model.safetensors", CHAT_TEMPLATE, TOOL_PARSER, "tokenizer.json", "README.md"} <= names
        assert not names & {"model.safetensors", "config.json"}
        card = (out / "README.md").read_text().splitlines()
        assert {"library_name: peft", f"base_model: {base}", "# An adapter that calls tools"} <= {*card}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--dtype", "q8_0"], "--dtype=q8_0 is that of GGUF"),
        (["--format", "adapter", "--dtype", "f16"], "--dtype=f16 is that of GGUF"),
        (["--format", "gguf", "--results", "table.md"], "--results is a table for the card"),
    ],
)
def test_an_option_of_another_form_is_refused(
    arguments: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended("export", str(make_run(tmp_path / "run")), "--out", str(tmp_path / "out"), *arguments) == 2
    assert problem in capsys.readouterr().err and not (tmp_path / "out").exists()


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return found


@pytest.mark.filterwarnings("ignore")
def test_what_has_no_adapter_or_no_public_base_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = make_run(tmp_path / "whole")
    assert ended("export", str(whole), "--format", "adapter", "--out", str(tmp_path / "out")) == 2
    assert "has no adapter: it was trained without lora.rank" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    run = with_adapter(make_run(tmp_path / "run"), "/home/me/base")
    assert ended("push", str(run), "me/mini", "--adapter") == 2
    assert "the adapter's base is the folder /home/me/base; name it on the hub" in capsys.readouterr().err
    for command in (["export", str(run), "--out", str(tmp_path / "out")], ["push", str(run), "me/mini"]):
        assert ended(*command, "--base", "me/base") == 2
        assert "--base=me/base is the base of an adapter, which is not to be written" in capsys.readouterr().err


def test_a_model_that_cannot_be_served_gets_a_card_with_the_reason(tmp_path: Path) -> None:
    folder = make_run(tmp_path, {"env.tool_call_format": None}) / "checkpoints" / "step-000048" / "hf"
    write_model_files(folder, {"resume_config": {"env.tool_call_format": None}})
    card = (folder / "README.md").read_text()
    assert "There is no chat template for servers: the record of this model names no" in card
    assert str(folder.parent) not in card and "unfinished" not in card
    assert not (folder / CHAT_TEMPLATE).exists()


def test_the_tool_parser_needs_no_package_but_vllm() -> None:
    """The modules that an exported tool parser imports, with vLLM's and its grammars replaced, load with the standard
    library alone."""
    code = (
        "import sys, types\n"
        "fake = types.ModuleType('vllm.tool_parsers.abstract_tool_parser')\n"
        "fake.DeltaMessage = fake.ExtractedToolCallInformation = fake.ToolParserManager = None\n"
        "fake.ToolParser = object\n"
        "fake.StructuredOutputsParams = fake.Grammar = None\n"
        "names = ('vllm', 'vllm.tool_parsers', 'vllm.sampling_params', 'xgrammar', fake.__name__)\n"
        "sys.modules |= dict.fromkeys(names, fake)\n"
        "before = set(sys.modules)\n"
        "import toolrl.serve.openai_server.tool_parser\n"
        "loaded = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(loaded - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['toolrl', 'verl']"


class Hub(BaseHTTPRequestHandler):
    """The hub's requests of an upload: create, preupload, LFS batch, commit."""

    protocol_version = "HTTP/1.1"
    server: Any

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"] or 0))
        path = self.path.partition("?")[0]
        if self.headers["authorization"] != "Bearer secret":
            return self._answer(401, {"error": "Invalid credentials"})
        if path == "/api/repos/create":
            self.server.created = json.loads(body)
            return self._answer(200, {"url": f"{self.server.address}/me/mini"})
        if "/preupload/" in path:
            files = [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if each["size"] > 10**6 else "regular",
                    "shouldIgnore": False,
                }
                for each in json.loads(body)["files"]
            ]
            return self._answer(200, {"files": files})
        if path.endswith("/objects/batch"):
            objects = json.loads(body)["objects"]
            for each in objects:
                each["actions"] = {"upload": {"href": f"{self.server.address}/lfs/{each['oid']}"}}
            return self._answer(200, {"transfer": "basic", "objects": objects})
        if "/commit/" in path:
            self.server.commit = (path, [json.loads(line) for line in body.splitlines()])
            found = {"commitUrl": f"{self.server.address}/me/mini/commit/1", "commitOid": "1", "pullRequestUrl": None}
            return self._answer(200, {**found, "success": True})
        return self._answer(200, {})

    def do_HEAD(self) -> None:
        self._answer(200, None)

    def do_PUT(self) -> None:
        self.server.stored[self.path.rpartition("/")[2]] = self.rfile.read(int(self.headers["content-length"]))
        self._answer(200, {})

    def _answer(self, status: int, value: Any) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@contextmanager
def hub() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.address, server.stored = f"http://127.0.0.1:{server.server_port}", {}
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def push(run: Path, address: str, token: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-m", "toolrl.cli", "push", str(run), "me/mini", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.long
def test_the_folder_is_uploaded_with_its_card(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with hub() as server:
        done = push(run, server.address, "secret", "--private", "--revision", "try")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == f"{server.address}/me/mini/commit/1"
    created = server.created
    assert (created["name"], created["organization"], created["visibility"]) == ("mini", "me", "private")
    path, lines = server.commit
    assert path == "/api/models/me/mini/commit/try"
    files = {line["value"]["path"]: line["value"] for line in lines if line["key"] in ("file", "lfsFile")}
    assert {"README.md", CHAT_TEMPLATE, TOOL_PARSER, "config.json", "tokenizer.json", "model.safetensors"} <= set(files)
    assert b"A model that calls tools" in base64.b64decode(files["README.md"]["content"])
    weights = (run / "checkpoints" / "step-000048" / "hf" / "model.safetensors").read_bytes()
    assert server.stored[files["model.safetensors"]["oid"]] == weights


@pytest.mark.long
def test_an_adapter_is_uploaded_alone(tmp_path: Path) -> None:
    run = with_adapter(make_run(tmp_path / "run"), "/home/me/base")
    with hub() as server:
        done = push(run, server.address, "secret", "--adapter", "--base", "me/base")
    assert done.returncode == 0, done.stderr[-2000:]
    _, lines = server.commit
    files = {line["value"]["path"]: line["value"] for line in lines if line["key"] in ("file", "lfsFile")}
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files
    assert json.loads(base64.b64decode(files["adapter_config.json"]["content"]))["base_model_name_or_path"] == "me/base"


@pytest.mark.long
def test_an_upload_that_fails_is_one_error(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with hub() as server:
        refused = push(run, server.address, "wrong")
    unreachable = push(run, server.address, "secret")
    for done in (refused, unreachable):
        assert done.returncode == 2
        assert f"ConfigError: me/mini was not uploaded to {server.address}" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.long
def test_a_full_disk_while_a_model_is_copied_for_an_upload_is_one_line(tmp_path: Path) -> None:
    """No file may have more than 64 KiB, which fails as a full disk does."""
    run = make_run(tmp_path / "run")
    code = "import resource, sys; from toolrl.serve.export.push import main\n"
    code += "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(run), "me/mini"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.returncode == 2 and f"no space left on {tmp_path} (File too large)" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not list(tmp_path.glob("toolrl-push-*"))
