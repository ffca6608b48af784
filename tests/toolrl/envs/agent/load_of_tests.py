"""Agents that only make requests: many sessions in one process, each with a client of its own, without retries.

    python load_of_tests.py    [[url, key, pauses in seconds, one before each request], ..] is its standard input

Prints one line of JSON: the seconds of each request, or the error that it ended with.
"""

import asyncio
import json
import sys
import time

import httpx


async def run_session(url: str, key: str, pauses: "list[float]") -> "list[float | str]":
    found = []
    messages = [{"role": "user", "content": "Hello"}]
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=300, verify=False) as client:
        for pause in pauses:
            await asyncio.sleep(pause)
            started = time.monotonic()
            try:
                answer = await client.post(f"{url}/v1/chat/completions", json={"model": "any", "messages": messages})
            except httpx.HTTPError as error:
                found.append(repr(error))
                continue
            if answer.status_code != 200:
                found.append(f"{answer.status_code} {answer.text[:200]}")
                continue
            content = answer.json()["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "And?"}]
            found.append(time.monotonic() - started)
    return found


async def main() -> None:
    given = json.loads(sys.stdin.read())
    found = await asyncio.gather(*(run_session(*each) for each in given))
    sys.stdout.write(json.dumps([each for session in found for each in session]) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
