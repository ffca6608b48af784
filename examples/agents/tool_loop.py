"""Python as a tool, on the official openai SDK: the environment `tool` as a program. It needs no reward of its own.

The code runs in `toolrl sandbox-server` (SANDBOX_URL), and may be used once, as in recipe=tool_loop.
"""

import json
import os

import httpx2
from openai import AsyncOpenAI

CODE = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
PYTHON = {"type": "function", "function": {"name": "python", "description": "Runs Python code.", "parameters": CODE}}


async def run(base_url, task):
    client = AsyncOpenAI(base_url=base_url)
    messages = list(task["prompt"])
    for choice in ("auto", "none"):
        done = await client.chat.completions.create(
            model="policy", messages=messages, tools=[PYTHON], tool_choice=choice
        )
        message = done.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            output = await python(json.loads(call.function.arguments)["code"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
        if not message.tool_calls:
            break


async def python(code):
    async with httpx2.AsyncClient(timeout=60) as sandbox:
        done = await sandbox.post(f"{os.environ['SANDBOX_URL']}/run_code", json={"code": code, "language": "python"})
    result = done.raise_for_status().json()["run_result"]
    return (result["stdout"] + result["stderr"]).strip()
