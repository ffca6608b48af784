r"""For `data.map`: rows of math problems whose prompts demand a box, as veRL's recipe of ReTool makes them.

Its data set class appends a sentence about `\boxed{}` to every prompt; this one appends its own to prompts without a
box.
"""

from collections.abc import Mapping
from typing import Any

_DEMAND = "\nPut the final answer in \\boxed{}."
_PROBLEMS = (("Problem", "Answer"), ("problem", "answer"))  # columns of AIME 2024 and of AIME 2025


def with_box(row: Any) -> Any:
    """A task row whose last message demands a box; rows of AIME are converted to task rows."""
    if not isinstance(row, Mapping):
        return row
    for problem, answer in _PROBLEMS:
        if row.get("prompt") is None and isinstance(row.get(problem), str) and row.get(answer) is not None:
            prompt = [{"role": "user", "content": row[problem]}]
            row = {"data_source": "aime", "prompt": prompt, "reward_model": {"ground_truth": str(row[answer])}}
    prompt = row.get("prompt")
    last = prompt[-1] if isinstance(prompt, list) and prompt else None
    if not isinstance(last, Mapping) or not isinstance(last.get("content"), str) or "\\boxed" in last["content"]:
        return row
    return {**row, "prompt": [*prompt[:-1], {**last, "content": last["content"] + _DEMAND}]}
