"""vLLM's own server on a scripted engine: python scripted_server.py TEXTS PROMPTS [vLLM's options]

TEXTS: a file with a JSON list of responses, which come in turn. PROMPTS: where the prompts' token ids go, one a line;
the number of lines is that of the next response.
All but the engine is vLLM's: routes, renderer, parsers, streams.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.entry import build_and_serve
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers import renderer_from_config
from vllm.utils.argparse_utils import FlexibleArgumentParser


class ScriptedEngine:
    """What the server uses of an engine."""

    errored, is_running, is_stopped, dead_error = False, True, False, RuntimeError()

    def __init__(self, args: Any, texts: Path, prompts: Path) -> None:
        self.vllm_config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        self.model_config = self.vllm_config.model_config
        self.renderer = renderer_from_config(self.vllm_config)
        self.input_processor = self.io_processor = None
        self._texts, self._prompts = texts, prompts

    async def generate(self, prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncIterator[RequestOutput]:
        asked, tokenizer = list(prompt["prompt_token_ids"]), self.renderer.tokenizer
        with self._prompts.open("a+") as log:
            log.seek(0)
            text = json.loads(self._texts.read_text())[len(log.readlines())]
            log.write(f"{json.dumps(asked)}\n")
        ids = tokenizer.encode(text, add_special_tokens=False)
        delta = params.output_kind.name == "DELTA"
        pieces = [text[at : at + 5] for at in range(0, len(text), 5)] if delta else [text]
        for number, piece in enumerate(pieces, 1):
            last = number == len(pieces)
            new = (ids if number == 1 else []) + ([tokenizer.eos_token_id] if last else [])
            output = CompletionOutput(0, piece, new, None, None, finish_reason="stop" if last else None)
            yield RequestOutput(request_id, None, asked, None, [output], last)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def is_tracing_enabled(self) -> bool:
        return False

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None: ...

    async def check_health(self) -> None: ...

    async def do_log_stats(self) -> None: ...

    def shutdown(self, timeout: float | None = None) -> None: ...


async def serve(texts: Path, prompts: Path, options: list[str]) -> None:
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(options)
    if args.tool_parser_plugin:
        from vllm.tool_parsers import ToolParserManager

        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    engine: Any = ScriptedEngine(args, texts, prompts)
    listening = socket.create_server((args.host, args.port))
    await (await build_and_serve(engine, "here", listening, args))


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
