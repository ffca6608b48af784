"""A loop with a shell on Harbor's task folders, as one that you have could be. tests/test.sh gives the reward.

The commands run in a runtime of the trainer (docs/swe.md), never here.
"""

import json
import os
import re
import urllib.request

from openai import OpenAI

SYSTEM = "Solve the task with bash. Write one command in ```bash and ``` at a time, and no command at the end."


def shell(command):
    """{output, exit_code, status}"""
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    body = json.dumps({"command": command}).encode()
    request = urllib.request.Request(os.environ["RUNTIME_URL"] + "/run", body, headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def run(base_url, task):
    client = OpenAI(base_url=base_url)  # the key is in the environment
    messages = [{"role": "system", "content": SYSTEM}, *task["prompt"]]
    for _ in range(10):
        done = client.chat.completions.create(model="policy", messages=messages, max_tokens=256)
        text = done.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        command = re.search(r"```bash\n(.*?)```", text, re.DOTALL)
        if command is None:
            break
        result = shell(command[1])
        messages.append({"role": "user", "content": f"{result['output']}\nexit code: {result['exit_code']}"})
