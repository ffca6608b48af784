"""The tool loop of openai_loop.py on the official anthropic SDK, whose policy is the same model."""

from anthropic import AsyncAnthropic

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
TOOL = {"name": "multiply", "description": "The product of two integers.", "input_schema": NUMBERS}


async def run(base_url, task):
    client = AsyncAnthropic()  # its URL and the key are in the environment
    messages = list(task["prompt"])
    for _ in range(3):
        done = await client.messages.create(model="policy", messages=messages, tools=[TOOL], max_tokens=64)
        messages.append({"role": "assistant", "content": done.content})
        calls = [block for block in done.content if block.type == "tool_use"]
        if not calls:
            break
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": multiply(call.input)} for call in calls]
        messages.append({"role": "user", "content": results})
    text = "".join(block.text for block in done.content if block.type == "text")
    return (task["answer"] in text) - len(text) / 1000


def multiply(numbers):
    try:
        return str(int(numbers["a"]) * int(numbers["b"]))
    except (KeyError, TypeError, ValueError) as error:  # the policy's mistake, which it should see
        return f"error: {error!r}"
