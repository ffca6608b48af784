"""Python as a tool, on the official openai SDK: the environment `tool` as a program. It needs no reward of its own.

The code runs in `toolrl sandbox-server` (SANDBOX_URL), and may be used once, as in recipe=tool_loop.
"""

import json
import os

import httpx2
from openai import AsyncOpenAI

AsyncOpenAI(api_key="-").chat.completions  # noqa: B018  imports the rest of the SDK before the episodes are forked
CODE = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
PYTHON = {"type": "function", "function": {"name": "python", "description": "Runs Python code.", "parameters": CODE}}


async def run(base_url, task):
    async with httpx2.AsyncClient(verify=False, timeout=600) as http:  # no certificates to load: both URLs are local
        client = AsyncOpenAI(base_url=base_url, http_client=http)
        messages = list(task["prompt"])
        for choice in ("auto", "none"):
            done = await client.chat.completions.create(
                model="policy", messages=messages, tools=[PYTHON], tool_choice=choice
            )
            message = done.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                output = await python(http, json.loads(call.function.arguments)["code"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
            if not message.tool_calls:
                break


async def python(http, code):
    done = await http.post(f"{os.environ['SANDBOX_URL']}/run_code", json={"code": code, "language": "python"})
    result = done.raise_for_status().json()["run_result"]
    return (result["stdout"] + result["stderr"]).strip()
