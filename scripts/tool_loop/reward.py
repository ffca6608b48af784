"""The reward of scripts/train_tool_loop.sh, and an example of one's own: half for asking, half for the answer."""

from __future__ import annotations

import re

from verl.types import Score, StopReason, Task, Trajectory

_BOX = re.compile(r"\\boxed\{([^{}]*)\}")


class ToolLoopReward:
    """asked: the tool was made to say the number. correct: the reply ends with it in a box, and ends by itself."""

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        heard = [reply.content.strip() for turn in trajectory.turns for reply in turn.replies]
        boxes = _BOX.findall(trajectory.reply)
        asked = task.answer in heard
        correct = trajectory.stop_reason is StopReason.STOP and bool(boxes) and boxes[-1] == task.answer
        return Score(0.5 * asked + 0.5 * correct, {"asked": float(asked), "correct": float(correct)})
