"""KPop (Ant Group, ringtech.notion.site/kpop): drops tokens at which engine and trainer are too far apart.

    d = the larger of KL(p_old, p_engine) and KL(p_engine, p_old) of the two events "this token" and "another one"
    a token's weight is p_old / p_engine where d <= 0.1, else 0
    loss = mean over tokens of weight * clip(A, p / p_old);  A as in GRPO

IcePop bounds the ratio, which masks rare tokens and misses frequent ones as the mismatch grows. The bound of KL is wide
for the former and tight for the latter. It is an off-policy correction (`algorithm.correction.rejection_level`), and a
part of any other algorithm. The bound is that of the authors; AReaL's default is 2.
"""

import math

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.correction import Correction
from verl.algorithms.estimators.advantage import grpo
from verl.algorithms.names import Level

KPOP = Algorithm(
    name="kpop",
    paper="ringtech.notion.site/kpop",
    advantage=grpo,
    by_group=True,
    correction=Correction(
        is_cap=math.inf, rejection_level=Level.BINARY_KL, rejection_lower=0.0, rejection_upper=math.exp(0.1)
    ),
)
