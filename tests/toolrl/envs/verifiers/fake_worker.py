"""Speaks the lines of toolrl/envs/verifiers/inside/worker.py with the standard library: a scripted environment.

The task's `script` is a list: of the new messages of each request, and in the end the line of the end.
"""

import json
import os
import sys

options = json.loads(sys.argv[1])


def send(**line):
    print(json.dumps(line), flush=True)


if options["id"] == "broken":
    send(failed="ModuleNotFoundError: broken")
    raise SystemExit(1)
if options["id"] == "silent":
    raise SystemExit(3)
send(ready=True)
episodes = {}  # name -> script, messages
for text in sys.stdin:
    line = json.loads(text)
    if "list" in line:
        for number in range(min(line["list"], 2)):
            send(task={"idx": number, "prompt": options["taskset"].get("prompt", "Hi."), "system_prompt": "Rules."})
        send(listed=2)
        continue
    (name,) = [line[key] for key in ("start", "answer", "stop") if key in line]
    if "start" in line:
        episodes[name] = line["task"]["script"], []
    if "stop" in line:
        episodes.pop(name)
        continue
    script, messages = episodes[name]
    if "answer" in line:
        messages.append(line["message"])
    part = script.pop(0)
    if part == "die":
        os._exit(9)
    if part == "compact":
        messages, part = [], [{"role": "user", "content": "Summary."}]
    if isinstance(part, list):
        messages.extend(part)
        tools = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}]
        send(episode=name, messages=messages, tools=tools if len(messages) > 2 else [])
    else:
        send(episode=name, **part)
