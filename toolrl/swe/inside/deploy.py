"""Starts and stops deployments of SWE-ReX, for toolrl/swe/deployments.py. Runs in a Python that has swe-rex.

Lines of JSON on standard input: {id, settings} starts one, {id} stops it. On standard output: {ready}, then
{id, url, token}, {id, stopped} or {id, problem}. All deployments are stopped when the input ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import TypeAdapter
from swerex.deployment.config import DeploymentConfig  # type: ignore[import-not-found]

MAX_THREADS = 64  # starts and stops at a time
deployments: dict[int, Any] = {}


def start(number: int, settings: dict[str, Any]) -> dict[str, Any]:
    deployments[number] = TypeAdapter(DeploymentConfig).validate_python(settings).get_deployment()
    try:
        asyncio.run(deployments[number].start())
    except Exception:
        stop(number)
        raise
    server = deployments[number].runtime._config
    url = server.host if server.port is None else f"{server.host}:{server.port}"
    return {"url": url, "token": server.auth_token}


def stop(number: int) -> dict[str, Any]:
    if deployment := deployments.pop(number, None):
        try:
            asyncio.run(deployment.stop())
        except Exception:  # noqa: BLE001  a server that does not answer; SWE-ReX then leaves its container
            deployment._runtime = None
            asyncio.run(deployment.stop())
    return {"stopped": True}


def answered(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return start(request["id"], request["settings"]) if "settings" in request else stop(request["id"])
    except Exception as error:  # noqa: BLE001  of the deployment, which is lost
        return {"problem": f"{type(error).__name__}: {error}"}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # SWE-ReX logs there

    def handle(request: dict[str, Any]) -> None:
        answers.write(json.dumps({"id": request["id"], **answered(request)}) + "\n")

    with ThreadPoolExecutor(MAX_THREADS) as threads:
        answers.write('{"ready": true}\n')
        for line in sys.stdin:
            threads.submit(handle, json.loads(line))
    with ThreadPoolExecutor(MAX_THREADS) as threads:
        for number in list(deployments):
            threads.submit(answered, {"id": number})


if __name__ == "__main__":
    main()
