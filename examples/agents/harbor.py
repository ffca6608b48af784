"""A loop with a shell on Harbor's task folders, as one that you have could be. tests/test.sh gives the reward.

Runs in the trainer's Python. The commands run in a runtime (docs/swe.md), never here.
"""

import re

from openai import AsyncOpenAI

from verl.kit.swe.harness import open_task

SYSTEM = "Solve the task with bash. Write one command in ```bash and ``` at a time, and no command at the end."


async def run(base_url, task):
    client = AsyncOpenAI(base_url=base_url)  # the key is in the environment
    messages = [{"role": "system", "content": SYSTEM}, *task["prompt"]]
    async with open_task(task["extra"]) as session:
        for _ in range(10):
            done = await client.chat.completions.create(model="policy", messages=messages, max_tokens=256)
            text = done.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})
            command = re.search(r"```bash\n(.*?)```", text, re.DOTALL)
            if command is None:
                break
            result = await session.runtime.run(command[1])
            messages.append({"role": "user", "content": f"{result.output}\nexit code: {result.exit_code}"})
        return await session.reward()
