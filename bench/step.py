"""Rows 1 and 2: CPU seconds of a GRPO step and of its update, TRL / ours.

    python bench/step.py [--rollout hf|vllm] [--our-rollout hf|vllm] [--trl-head responses|all] [--prompt-text all|user]
                         [--prompts 2] [--n 4] [--response 64] [--rounds 3] [--model DIR] [--data FILE] [--trl DIR]

Both sides train the same model on the same real prompts of ToolRL: bf16 weights, AdamW, fixed response length, no KL,
no checkpointing, one thread. A hash of the response is added to ToolRL's reward, so that every group has nonzero
advantages: our side skips zero-advantage groups, TRL does not. Before the measurement, both compute loss and gradient
norm of the same batch in float32. TRL is installed once into its own environment on top of this one: torch,
transformers and vLLM are the same on both sides. With vLLM on CPU, TRL's own weight sync fails and is replaced by
vLLM's `reload_weights`, and its importance sampling correction, an additional pass, is off.

On a GPU TRL's LM head reads the trained positions of the responses; on a CPU it reads all positions, prompts included,
which doubles its update on long prompts. `--trl-head responses`, the default, gives it on this machine what it has on a
GPU; `all` is TRL unchanged. `--prompt-text user` leaves out the system message with its tools: prompts of at most 80
tokens, where a shared prompt saves nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from common import (
    SMOLLM2,
    TOOLRL_ROWS,
    Result,
    Side,
    alternate,
    console,
    median_ratio,
    medians,
    need_smollm2,
    need_toolrl_rows,
    report,
)

from verl.chat.template import ChatTemplate
from verl.data.tasks import TaskSet, TaskStream
from verl.types import Task
from verl.utils.reward_score.rlla import RllaOptions, compute_score

TRL = "1.16.0"
ENGINES = ("hf", "vllm")  # transformers' generate, vLLM
HERE = Path(__file__).parent
HEADS = ("responses", "all")  # positions that TRL's LM head reads
MAX_PROMPT = {"all": 600, "user": 80}  # tokens by --prompt-text; whole prompts of these rows have 550 on average
MICRO_BATCH = 4  # sequences per forward pass in TRL
STEP_TARGETS = {("hf", "vllm"): 4.0, ("vllm", "vllm"): 3.0}  # TRL's engine and ours, whole prompts
UPDATE_TARGETS = {4: 4.0, 8: 6.0}  # by responses per prompt, whole prompts
CHECKED_RESPONSES = 2  # per prompt, in the batch for the loss comparison
TOLERANCE = 1e-4  # float32 losses (absolute; advantages are about 1) and gradient norms (relative)
RELOADED = "TRL's weight sync fails on vLLM's CPU weights and is replaced by reload_weights"
CheckRows = list[tuple[tuple[int, ...], tuple[int, ...], float]]  # prompt, response, advantage


@dataclass(frozen=True)
class Spec:
    """The settings of both sides."""

    model: str
    data: str
    rollout: str  # TRL's
    our_rollout: str
    trl_head: str
    prompt_text: str
    prompts: int
    n: int
    response: int
    rounds: int

    @property
    def max_prompt(self) -> int:
        """In tokens."""
        return MAX_PROMPT[self.prompt_text]


def stream(spec: Spec, chat: ChatTemplate) -> TaskStream:
    """The tasks in the training order of both sides."""
    tasks: Iterable[Task] = TaskSet(spec.data, max_bad_share=1.0)
    if spec.prompt_text == "user":
        tasks = (replace(task, prompt=task.prompt[-1:]) for task in tasks)
    return TaskStream([[task for task in tasks if len(chat.prompt_ids(task.prompt)) <= spec.max_prompt]], seed=0)


def first_tasks(spec: Spec, chat: ChatTemplate, count: int) -> list[Task]:
    """The first `count` tasks of the stream."""
    return list(islice(stream(spec, chat), count))


def check_rows(spec: Spec, chat: ChatTemplate) -> CheckRows:
    """The batch for the loss comparison: shifted gold answers."""
    rows = []
    for task in first_tasks(spec, chat, spec.prompts):
        prompt, gold = chat.prompt_ids(task.prompt), chat.response_ids(task.answer)[0]
        long = gold * (spec.response // len(gold) + 2)
        rows += [(prompt, long[at : at + spec.response], 1.0 - 1.5 * at) for at in range(CHECKED_RESPONSES)]
    return rows


def reward(response: str, answer: str) -> float:
    """ToolRL's reward plus a hash, so that no two responses tie."""
    return compute_score(response, answer, 0, RllaOptions())[0] + zlib.crc32(response.encode()) / 2**32


def trl_python(folder: Path) -> Path:
    """The interpreter of an environment with TRL on top of this one's packages; created if missing."""
    python = folder / "bin/python"
    complete = folder / f"trl-{TRL}"
    if not complete.exists():
        console.print(f"installing TRL {TRL} into {folder}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        purelib = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        own = subprocess.run([python, "-c", purelib], check=True, capture_output=True, text=True).stdout.strip()
        Path(own, "beneath.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        # pip reports conflicts of the underlying packages, which it does not change.
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"trl=={TRL}"]
        done = subprocess.run(install, check=False, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"pip cannot install trl=={TRL}:\n{done.stderr}")
        complete.touch()
    return python


def check(ours: Side, theirs: Side) -> dict[str, tuple[float, float]]:
    """Differences of float32 loss and gradient norm of the same batch; exits if they are too large."""
    of_ours = ours.ask({"do": "check"})
    of_theirs = theirs.ask({"do": "check", "old_logprobs": of_ours["old_logprobs"]})
    norm_gap = abs(of_ours["grad_norm"] / of_theirs["grad_norm"] - 1.0)
    limits = {
        "difference of the losses": (abs(of_ours["loss"] - of_theirs["loss"]), TOLERANCE),
        "relative difference of the gradients' norms": (norm_gap, TOLERANCE),
    }
    for name, (measured, bound) in limits.items():
        if not measured <= bound:
            raise SystemExit(f"the sides differ: {name} {measured:.3g} > {bound:g}")
    return limits


def results(
    spec: Spec, figures: dict[str, list[dict[str, float]]], limits: dict[str, tuple[float, float]]
) -> list[Result]:
    """The rows of the step and the update."""
    head = "" if spec.trl_head == "responses" else ", its head at all positions"
    engines = f"TRL ({spec.rollout}{head}) / ours ({spec.our_rollout})"
    size = f"{spec.prompts} x {spec.n} responses of {spec.response} tokens, prompts <= {spec.max_prompt}"
    long = spec.prompt_text == "all"

    def result(row: int, phase: str, target: float) -> Result:
        values = {side: [each[phase] for each in rounds] for side, rounds in figures.items()}
        return Result(
            row=row,
            name=f"GRPO {phase}, {engines}, {size}",
            ratio=median_ratio(values["theirs"], values["ours"]),
            target=target,
            ours=medians(figures["ours"]),
            theirs=medians(figures["theirs"]),
            limits=limits,
            note=RELOADED if spec.rollout == "vllm" else "",
        )

    step_target = STEP_TARGETS.get((spec.rollout, spec.our_rollout), 1.0) if long else 1.0
    update_target = UPDATE_TARGETS.get(spec.n, 1.0) if long else 1.0
    return [result(1, "step", step_target), result(2, "update", update_target)]


def main() -> None:
    """Compare losses, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollout", choices=ENGINES, default="hf")
    parser.add_argument("--our-rollout", choices=ENGINES, default="vllm")
    parser.add_argument("--trl-head", choices=HEADS, default="responses")
    parser.add_argument("--prompt-text", choices=MAX_PROMPT, default="all")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, default=SMOLLM2)
    parser.add_argument("--data", type=Path, default=TOOLRL_ROWS)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser.add_argument("--trl", type=Path, default=cache / f"verl-bench/trl-{TRL}", help="TRL's environment")
    arguments = parser.parse_args()
    need_smollm2(arguments.model)
    need_toolrl_rows(arguments.data)
    fields = {name: value for name, value in vars(arguments).items() if name != "trl"}
    places = {"model": str(arguments.model), "data": str(arguments.data)}
    spec = Spec(**fields | places)
    settings = json.dumps(asdict(spec))
    python = str(trl_python(arguments.trl))
    with (
        Side([sys.executable, str(HERE / "step_ours.py"), settings]) as ours,
        Side([python, str(HERE / "step_trl.py"), settings]) as theirs,
    ):
        limits = check(ours, theirs)
        sides: dict[str, Any] = {"ours": ours, "theirs": theirs}
        figures = alternate(
            {name: lambda side=side: side.ask({"do": "step"}) for name, side in sides.items()},
            spec.rounds,
            measure=lambda work: work(),
        )
    for result in results(spec, figures, limits):
        report(result, trl=TRL)


if __name__ == "__main__":
    main()
