"""The folder of a small run with hostile text in it, without a training."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from toolrl.analysis.samples.sample_files import KeptSample, LossScale, SampleFiles, StepSamples
from verl.tracking.jsonl import write_jsonl
from verl.tracking.transcripts import Transcripts
from verl.types import (
    Completion,
    FinishReason,
    Message,
    Outcome,
    Score,
    StopReason,
    Task,
    ToolStatus,
    ToolUse,
    Trajectory,
    TrajectoryGroup,
    Turn,
)

HOSTILE = "</script></pre><img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>\u2028"
CALL = '<tool_call>\n{"name": "weather", "parameters": {"city": "Oslo"}}\n</tool_call>'
PER_GROUP = 4
_SCALE = LossScale(
    aggregation="token-mean",
    length=None,
    minibatches=1,
    num_trained=np.full(5, 3),
    groups=np.zeros(5),
    episodes=np.array([0, 0, 1, 2, 3]),
)


def save_report_run(folder: Path, steps: int = 12, groups: int = 3, gain: float = 0.1) -> Path:
    """`steps` steps of `groups` groups of 4; group 0 has equal rewards, and two segments in its first rollout."""
    write_jsonl(folder / "metrics.jsonl", [_validated(0, 0.2), *(_metrics(step, gain) for step in range(1, steps + 1))])
    (folder / "config.yaml").write_text("model:\n  path: a/model\nalgorithm:\n  name: grpo\ntrainer:\n  seed: 7\n")
    write_jsonl(folder / "code_version.json", [{"toolrl": "1.0", "source": f"source of {gain}"}])
    write_jsonl(folder / "data_versions.jsonl", [{"source": str(folder / "train.parquet"), "sha256": "abc"}])
    transcripts, samples = (
        Transcripts(folder),
        SampleFiles(folder, lambda ids: f"{HOSTILE if ids[0] == 9 else 'w'}{ids[0]} "),
    )
    for step in {*range(0, steps, 6), steps}:
        solved = round(30 * gain) if step == steps else 2
        transcripts.write_validation(step, [_validation_row(step, task, task < solved) for task in range(8)])
    for step in range(1, steps + 1):
        made = [_group(step, number) for number in range(groups)]
        transcripts.write(step, made)
        kept = [_sample(number, segment) for number in range(PER_GROUP) for segment in range(2 if number == 0 else 1)]
        loss, sums = dict.fromkeys(range(5), 0.25), {row: [3.75] for row in range(5)}  # a token weighs 1 / 15
        samples.write(step, StepSamples(samples=kept, loss=loss, sums=sums, scale=_SCALE))
    return folder


def _text(ids: list[int]) -> str:
    return f"{HOSTILE if ids[0] == 9 else 'w'}{ids[0]} "


def _metrics(step: int, gain: float) -> dict[str, float]:
    noise = (step * 7 % 5) / 50
    return {
        "step": step,
        "time": 1000.0 + 60 * step,
        "reward/total": gain * step + noise,
        "reward/zero_variance_groups": 1 / 3,
        "actor/entropy": 1 / step,
        "actor/loss": 1.25,
        "time/rollout_s": 3.0,
        "time/update_s": 1.0 + noise,
        "time/step_s": 4.5,
        "perf/tokens_per_s": 1000.0,
        "mine/own": float(step),
        **(_validated(step, 0.8) if step % 6 == 0 else {}),
    }


def _validated(step: int, value: float) -> dict[str, float]:
    return {"step": step, "time": 1000.0 + 60 * step, "val/test/total": value, "val/test/total_stderr": 0.03}


def _validation_row(step: int, task: int, solved: bool) -> dict[str, Any]:
    return {
        "set": "test",
        "step": step,
        "task_id": f"test{task}",
        "prompt": [{"role": "user", "content": f"question {task} {HOSTILE}"}],
        "responses": [{"role": "assistant", "content": f"step {step} {HOSTILE}"}],
        "answer": "gold",
        "score": {"total": float(solved), "parts": {}},
        "exact": float(solved),
    }


def _group(step: int, number: int) -> TrajectoryGroup:
    task = Task(f"task{number}{HOSTILE}", (Message("user", f"question {number} {HOSTILE}"),), HOSTILE, "source")
    rewards = [1.0] * PER_GROUP if number == 0 else [float(index) for index in range(PER_GROUP)]
    completion = Completion(array("i", [1, 9, 3]), array("f", [-0.5] * 3), FinishReason.STOP, step - 1)
    observed = (Message("tool", f"cold {HOSTILE}", tool="weather"),)
    turns = (
        Turn(array("i", [4, 5]), completion, Message("assistant", f"first {CALL} {HOSTILE}"), observed),
        Turn(array("i", [6]), completion, Message("assistant", f"step {step} group {number}")),
    )
    uses = (ToolUse("weather", ToolStatus.TIMEOUT if number == 1 else ToolStatus.SUCCESS, 0.5),)
    stop = StopReason.LENGTH if number == 2 else StopReason.STOP
    rollouts = [Trajectory(task, index, turns, stop, Outcome.SCORED, uses) for index in range(PER_GROUP)]
    scores = tuple(Score(reward, {"correct": reward, HOSTILE: 0.0}) for reward in rewards)
    return TrajectoryGroup(task, tuple(rollouts), scores, tuple(rewards))


def _sample(line: int, segment: int) -> KeptSample:
    mask = np.array([False, False, True, True, True])
    values = np.array([-0.5, -1.0, -1.5], dtype=np.float32)
    return KeptSample(
        row=line + segment,
        line=line,
        task_id=f"task0{HOSTILE}",
        group=0,
        index=line,
        segment=segment,
        num_segments=2 if line == 0 else 1,
        reward=1.0,
        group_returns=[1.0] * PER_GROUP,
        token_ids=np.array([4, 5, 1, 9, 3]),
        mask=mask,
        versions=np.array([-1, -1, 0, 0, 1]),
        columns={"rollout_logprobs": values, "logprobs": values + 1.2e-5, "advantages": values * 0, "entropy": -values},
    )


def damage(folder: Path) -> None:
    """A damaged line or file of every kind that a run leaves."""
    (folder / "config.yaml").write_text("a: [")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99\n{"step": 100, "reward/to')
    (folder / "transcripts" / "step-000001.jsonl").write_text(json.dumps({"step": 1}) + "\n[]\nno json\n")
    path = folder / "samples" / "step-000002.npz"
    path.write_bytes(path.read_bytes()[:-30])
