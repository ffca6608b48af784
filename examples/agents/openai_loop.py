"""A tool loop on the official openai SDK. The reward: the right number, in few characters."""

import json

from openai import AsyncOpenAI

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
TOOL = {"name": "multiply", "description": "The product of two integers.", "parameters": NUMBERS}


async def run(base_url, task):
    client = AsyncOpenAI(base_url=base_url)  # the key is in the environment
    messages = list(task["prompt"])
    for _ in range(3):
        done = await client.chat.completions.create(
            model="policy", messages=messages, tools=[{"type": "function", "function": TOOL}], max_tokens=64
        )
        message = done.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = multiply(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    text = message.content or ""
    return (task["answer"] in text) - len(text) / 1000


def multiply(arguments):
    try:
        numbers = json.loads(arguments)
        return str(int(numbers["a"]) * int(numbers["b"]))
    except (KeyError, TypeError, ValueError) as error:  # the policy's mistake, which it should see
        return f"error: {error!r}"
