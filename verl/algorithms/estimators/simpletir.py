"""SimpleTIR (arXiv 2509.02479): GRPO without the rollouts that have a void turn.

    void: a turn with neither a call that can be read nor an answer
    A = (r - mean(group)) / (std(group) + 1e-6);  loss = mean over tokens of clip(A, p / p_old)

Tool results that the model has never seen make it write unlikely tokens, from turn to turn more, whose gradients
explode. Void turns are where that shows. The filter `void_turns` drops these rollouts before the advantages, so the
baseline is that of the others. Any other algorithm may have it, too (`algorithm.filters`).
"""

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import grpo
from verl.algorithms.filters import void_turns

SIMPLETIR = Algorithm(
    name="simpletir",
    paper="arXiv 2509.02479",
    advantage=grpo,
    by_group=True,
    filters=(void_turns,),
)
