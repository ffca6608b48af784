"""The agent of the chaos suite: two requests, with a pause between them. Nothing of ours is imported."""

import json
import os
import time
import urllib.request

CALL_S = 0.3
MAX_TOKENS = 16


def run(base_url, task):
    """Without a reward: the run's function scores the recorded turns."""
    messages = list(task["prompt"])
    for _ in range(2):
        headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
        body = json.dumps({"messages": messages, "max_tokens": MAX_TOKENS}).encode()
        request = urllib.request.Request(base_url + "/chat/completions", body, headers)
        with urllib.request.urlopen(request) as answer:
            message = json.load(answer)["choices"][0]["message"]
        messages += [message, {"role": "user", "content": "And?"}]
        time.sleep(CALL_S)
