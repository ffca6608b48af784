"""The tool loop of openai_loop.py on LiteLLM, which repeats responses with fields of its own."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # prices are not needed, and would be fetched at the import
from litellm import acompletion
from openai_loop import TOOL, multiply


async def run(base_url, task):
    messages = list(task["prompt"])
    for _ in range(3):
        done = await acompletion(
            "openai/policy",
            messages,
            base_url=base_url,
            tools=[{"type": "function", "function": TOOL}],
            max_tokens=64,
        )
        message = done.choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = multiply(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    text = message.content or ""
    return (task["answer"] in text) - len(text) / 1000
