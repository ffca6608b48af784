"""Serve a trained policy as an OpenAI server on vLLM: toolrl serve RUN [RUN ..] [--port 8000 ..] [-- VLLM OPTIONS]

RUN is the output folder of a training, or a model folder. Several runs with adapters of one base are served side by
side. Requests with `tools` are rendered as in training, and answers have `tool_calls`, streaming or not
(docs/serving.md). Options after -- go to vLLM: -- --max-model-len 4096
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from toolrl.serve.openai_server import supervise
from toolrl.serve.openai_server.adapters import adapter_arguments, common_base
from toolrl.serve.openai_server.parsing import PARSER_NAME
from toolrl.serve.openai_server.requests import CheckedRequests
from toolrl.serve.openai_server.served_model import TrainedModel, add_format_arguments, chosen_format, find_model
from toolrl.serve.openai_server.serving_files import (
    CHAT_TEMPLATE,
    TOOL_PARSER,
    base_template,
    is_our_parser,
    serving_texts,
    write_serving_files,
)
from toolrl.servers.serving import ServingConfig, find_token
from verl.errors import ConfigError, VerlError
from verl.host import untrusted_files
from verl.host.arguments import Arguments
from verl.host.exits import write_error
from verl.host.packages import SET_UP
from verl.pretrained import read_model_config, read_tokenizer
from verl.rollout.layer_options import check_layers, state_options

_GENERATION_CONFIG = "generation_config.json"
_MOST_BYTES = 1 << 22  # of a chat template or a tool parser
_ENTRY = "vllm.entrypoints.openai.api_server"  # `vllm serve` needs metadata that the CPU distribution lacks


def main(argv: Sequence[str] | None = None) -> int:
    """Start vLLM in place of this process. Returns 2, after an error on stderr, if it cannot start."""
    own, _, further = _split(list(sys.argv[1:] if argv is None else argv))
    options = arguments().read(own)
    sys.stdout.write(f"starting vLLM with {options.model}: this may take a minute or more\n")
    sys.stdout.flush()
    try:
        command, environment = serving_command(options, further)
        health = f"http://{options.host}:{options.port}/health"
        ready = ["--ready", health, _example(options, "VLLM_API_KEY" in environment)]
        os.execvpe(sys.executable, [sys.executable, supervise.__file__, *ready, *command], environment)  # frees memory
    except VerlError as error:
        return write_error(error)


def arguments() -> Arguments:
    parser = Arguments("toolrl serve", __doc__)
    add_format_arguments(parser)
    parser.add_argument("more", nargs="*", metavar="RUN", help="further runs, with adapters of the same base")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--name", help="model name of the first RUN in requests (default: the name of its folder)")
    parser.add_argument("--api-key", help="token of the clients; better: $VERL_SERVICE_TOKEN or --token-file")
    parser.add_argument("--token-file", type=Path, help="file with the clients' token; created if missing")
    parser.add_argument("--no-token", action="store_true", help="accept requests without a token")
    return parser


def _example(options: argparse.Namespace, has_token: bool) -> str:
    """The message printed once the server answers: its address and a first request."""
    address, names = f"http://{options.host}:{options.port}", _names(options)
    body = json.dumps({"model": names[0], "messages": [{"role": "user", "content": "Hello"}]})
    token = " -H 'Authorization: Bearer TOKEN'" if has_token else ""
    request = f"curl {address}/v1/chat/completions -H 'Content-Type: application/json'{token} -d {shlex.quote(body)}"
    return f"ready: {address}/v1, model {', '.join(names)}\n{request}"


def _names(options: argparse.Namespace) -> list[str]:
    """Names of the models in requests. Raises ConfigError if two are equal."""
    first, *others = (Path(each).resolve().name for each in (options.model, *options.more))
    names = [options.name or first, *others]
    if twice := sorted({each for each in names if names.count(each) > 1}):
        raise ConfigError(f"two models have the name {twice[0]}; set --name, or rename the folder of a run")
    return names


def _split(argv: list[str]) -> tuple[list[str], str, list[str]]:
    place = argv.index("--") if "--" in argv else len(argv)
    return argv[:place], "--", argv[place + 1 :]


def serving_command(options: argparse.Namespace, further: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """(command, environment) of vLLM's server. Raises ConfigError, DataError."""
    if find_spec("vllm") is None:
        raise ConfigError(f"vLLM is not installed; {SET_UP}")
    targets = zip(_names(options), (options.model, *options.more), strict=True)
    models = {name: find_model(target, options.checkpoint) for name, target in targets}
    model, served = _served(models)
    folder = _common_folder(options, models)
    _check_port(options.host, options.port)
    token = options.api_key or find_token(
        ServingConfig(options.host, options.port, options.token_file, options.no_token)
    )
    on_gpu = _has_gpu()
    command = [
        *(sys.executable, "-W", "ignore::DeprecationWarning", "-m", _ENTRY),
        *("--model", model, *served),
        *("--host", options.host, "--port", str(options.port)),
        *("--chat-template", str(folder / CHAT_TEMPLATE), "--chat-template-content-format", "string"),
        *("--enable-auto-tool-choice", "--tool-parser-plugin", str(folder / TOOL_PARSER)),
        *("--tool-call-parser", PARSER_NAME),
        *("--middleware", f"{CheckedRequests.__module__}.{CheckedRequests.__name__}"),
        *(["--generation-config", str(folder)] if (folder / _GENERATION_CONFIG).is_file() else []),
        *([] if on_gpu else ["--enforce-eager"]),
        *_state_arguments(model, on_gpu, further),
        *further,
    ]
    environment = {**({} if on_gpu else _CPU_DEFAULTS), **_QUIET, **os.environ}
    return command, {**environment, "VLLM_API_KEY": token} if token else environment


def _state_arguments(model: str, on_gpu: bool, further: Sequence[str]) -> list[str]:
    """Those of layers with state, as engines have them in training. Raises ConfigError for a model that vLLM cannot
    run, and for one of them in further arguments, of which vLLM would take the last alone."""
    config = read_model_config(model)
    check_layers(config, _dtype(further), not on_gpu)
    options = state_options(config.model_type, not on_gpu, {})
    needed = []
    for name, value in ((name.replace("_", "-"), value) for name, value in options.items()):
        argument = f"--no-{name}" if value is False else f"--{name}={json.dumps(value)}"
        if given := [each for each in further if re.match(rf"--(no-)?{name}([=.]|$)", each.replace("_", "-"))]:
            raise ConfigError(f"{given[0]} cannot be given: {config.model_type} needs {argument} on a CPU")
        needed.append(argument)
    return needed


def _dtype(further: Sequence[str]) -> str:
    """The engine's: as its arguments have it, or what vLLM takes for most models."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dtype", default="bfloat16")
    dtype: str = parser.parse_known_args([*further])[0].dtype
    return dtype


# Without them vLLM takes half of the memory, and binds threads to cores that other processes use.
_CPU_DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}


# vLLM logs a hundred lines about its start. Python's resource tracker warns of shared memory that vLLM leaves at
# Ctrl-C, and removes it.
_QUIET = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning",
}


def _served(models: Mapping[str, TrainedModel]) -> tuple[str, list[str]]:
    """(the model that vLLM loads, its arguments for names and adapters). Raises ConfigError."""
    (name, first), *others = models.items()
    if first.adapter is None and not others:
        return str(first.folder), ["--served-model-name", name]
    base = common_base(models)
    return base, ["--tokenizer", str(first.folder), *adapter_arguments(models, base)]


def _common_folder(options: argparse.Namespace, models: Mapping[str, TrainedModel]) -> Path:
    """The folder of chat template and tool parser, of which a server has one each. Raises ConfigError."""
    folders = [_serving_folder(options, each) for each in models.values()]
    files = (CHAT_TEMPLATE, TOOL_PARSER)
    texts = [[untrusted_files.read(folder, name, _MOST_BYTES) for name in files] for folder in folders]
    for name, each in zip(models, texts, strict=True):
        if each != texts[0]:
            first = next(iter(models))
            raise ConfigError(f"{name} has another tool-call format or prompt than {first}; serve them separately")
    return folders[0]


def _serving_folder(options: argparse.Namespace, model: TrainedModel) -> Path:
    """The folder of chat template and tool parser: the model's, or one of this content for temporary files."""
    chosen = options.tool_call_format or options.prompt_template
    if not chosen and all((model.folder / name).is_file() for name in (CHAT_TEMPLATE, TOOL_PARSER)):
        if is_our_parser(model.folder / TOOL_PARSER):
            return model.folder
        if not model.state:
            problem = "is code that toolrl did not write, so it is not imported"
            raise ConfigError(f"{model.folder / TOOL_PARSER} {problem}; set --tool-call-format to the model's")
    template = base_template(read_tokenizer(str(model.folder), "model"), with_tools=True)
    texts = serving_texts(model.folder, chosen_format(options, model, template))
    digest = hashlib.sha256("".join(texts.values()).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"toolrl-serve-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:  # vLLM imports the parser
        raise ConfigError(f"{folder} may be written by another user; remove it, or set TMPDIR to a folder of your own")
    write_serving_files(folder, texts)
    return folder


def _check_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except (OSError, OverflowError, TypeError) as error:  # TypeError: an invalid host name
        raise ConfigError(f"cannot listen on {host} port {port} ({error}); choose another --host or --port") from error


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
