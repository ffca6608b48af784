"""Agents, as users write them: nothing of ours is imported."""

import asyncio
import importlib.util
import os
import signal
import sys
import time

from openai import AsyncOpenAI, BadRequestError, OpenAI

assert importlib.util.find_spec("puller") is None, "modules of toolrl.envs.agent hide packages of agents"
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


async def two_turns(base_url, task):
    """Asks twice; the reward is the length of the answers."""
    client = AsyncOpenAI(base_url=base_url)
    messages = list(task["prompt"])
    for _ in range(2):
        done = await client.chat.completions.create(model="any", messages=messages, tools=[WEATHER])
        message = done.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if message.tool_calls:
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "-3"} for call in message.tool_calls]
        else:
            messages.append({"role": "user", "content": "And?"})
    total = sum(len(each["content"] or "") for each in messages if each["role"] == "assistant" and "content" in each)
    return {"reward": total / 100, "parts": {"length": total}}


def streamed(base_url, task):
    """One streamed response; its number of characters is the reward."""
    with OpenAI().chat.completions.create(model="any", messages=task["prompt"], stream=True) as stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    return len(text)


def crash(base_url, task):
    OpenAI().chat.completions.create(model="any", messages=task["prompt"])
    raise RuntimeError("this agent has a bug")


def killed(base_url, task):
    """The first rollout that gets here kills its own process."""
    OpenAI().chat.completions.create(model="any", messages=task["prompt"])
    if task["id"] == "killed#0":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def no_reward(base_url, task):
    OpenAI().chat.completions.create(model="any", messages=task["prompt"])


def never_calls(base_url, task):
    return 1.0


def imports_requests(base_url, task):
    """The reward is whether this package is the one of its name."""
    import requests

    OpenAI().chat.completions.create(model="any", messages=task["prompt"])
    return hasattr(requests, "get") + 0.0


def hangs(base_url, task):
    OpenAI().chat.completions.create(model="any", messages=task["prompt"])
    time.sleep(3600)


async def too_many(base_url, task):
    """Goes on until it is refused, and returns a reward in spite of that."""
    client = AsyncOpenAI(base_url=base_url)
    messages = list(task["prompt"])
    try:
        while True:
            done = await client.chat.completions.create(model="any", messages=messages)
            messages += [{"role": "assistant", "content": done.choices[0].message.content}, *task["prompt"]]
    except BadRequestError as error:
        return {"reward": 0.5, "parts": {"refused": float("max_turns" in str(error))}}


async def unguarded(base_url, task):
    """Goes on until the error of a limit ends it."""
    client = AsyncOpenAI(base_url=base_url)
    messages = list(task["prompt"])
    while True:
        done = await client.chat.completions.create(model="any", messages=messages)
        messages += [{"role": "assistant", "content": done.choices[0].message.content}, *task["prompt"]]


async def gold_lines(base_url, task):
    """The share of the gold's lines in the response, less its length; one more turn without effect on it."""
    client = AsyncOpenAI(base_url=base_url)
    messages = list(task["prompt"])
    done = await client.chat.completions.create(model="any", messages=messages)
    text = done.choices[0].message.content
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Hello"}]
    await client.chat.completions.create(model="any", messages=messages, max_tokens=8)
    lines = task["answer"].splitlines()
    return sum(line in text.splitlines() for line in lines) / len(lines) - len(text) / 1000


async def short_turns(base_url, task):
    """Three short responses; the number of different letters is the reward."""
    client = AsyncOpenAI(base_url=base_url)
    messages, written = list(task["prompt"]), ""
    for _ in range(3):
        done = await client.chat.completions.create(model="any", messages=messages, max_tokens=6)
        text = done.choices[0].message.content
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on"}]
        written += text
    return len(set(written)) / 10


async def best_of_two(base_url, task):
    """Two parallel requests with the same messages."""
    client = AsyncOpenAI(base_url=base_url)
    request = {"model": "any", "messages": task["prompt"]}
    pair = await asyncio.gather(*(client.chat.completions.create(**request) for _ in range(2)))
    return max(len(each.choices[0].message.content) for each in pair)


if __name__ == "__main__":
    sys.exit("run by env.agent alone")
