"""mini-swe-agent repairs a program of QuixBugs. Its commands and the tests run in `toolrl sandbox-server`, never here.

SANDBOX_URL is the server's address. The reward: the share of tests that pass, and up to a tenth for the
shares of requests that gave one command, and a command that works.
"""

import os
from base64 import b64decode, b64encode

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1"}
os.environ |= {"MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1"}

import httpx
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

SYSTEM = "You repair Python programs with bash. When one is repaired: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
START = """{{task}}
Write one command that repairs it, such as:
```bash
sed -i 's/a - b/a + b/' program.py
```"""
TESTS = """
import json, program
for given, expected in map(json.loads, open("tests.jsonl")):
    try:
        print("passed" if program.{name}(*given) == expected else "failed")
    except Exception:
        print("failed")
"""


class Sandbox(LocalEnvironment):
    def __init__(self, program):
        super().__init__()
        self.files, self.commands, self.worked = {"program.py": program.encode()}, 0, 0

    def execute(self, action, cwd="", **_):
        """A command starts with the program as the one before left it."""
        done = self.run("bash", action["command"])
        self.commands += 1
        self.worked += done["returncode"] == 0
        self._check_finished(done)
        return done

    def run(self, language, code):
        files = {name: b64encode(content).decode() for name, content in self.files.items()}
        body = {"language": language, "code": code, "files": files, "fetch_files": ["program.py"], "run_timeout": 5}
        done = httpx.post(f"{os.environ['SANDBOX_URL']}/run_code", json=body, timeout=60).raise_for_status().json()
        self.files |= {name: b64decode(content) for name, content in done["files"].items()}
        result = done["run_result"]
        output = (result["stdout"] + result["stderr"])[:1000]
        return {"output": output, "returncode": result["return_code"], "exception_info": ""}


def run(base_url, task):
    settings = {"api_base": base_url, "max_tokens": 96}
    model = LitellmTextbasedModel(
        model_name="openai/policy", model_kwargs=settings, action_regex=r"```bash\s*\n(.*?)\n```"
    )
    sandbox = Sandbox(task["extra"]["program"])
    agent = DefaultAgent(model, sandbox, system_template=SYSTEM, instance_template=START, step_limit=3)
    agent.run(task["prompt"][0]["content"])
    sandbox.files["tests.jsonl"] = task["answer"].encode()
    results = sandbox.run("python", TESTS.format(name=task["extra"]["name"]))["output"].splitlines()
    passed = results.count("passed") / len(task["answer"].splitlines())
    commands = (sandbox.commands + sandbox.worked) / (2 * agent.n_calls)
    return {"reward": passed + 0.1 * commands, "parts": {"passed": passed, "commands": commands}}
