"""What every preset is made of, in words: the table of `python -m verl.algorithms` and the page docs/algorithms.md."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial

from verl.algorithms import ADV_ESTIMATORS, ALGORITHMS
from verl.algorithms.algorithm import Algorithm, KLPlacement, OldLogprobs
from verl.algorithms.filters import name_of
from verl.registry import resolve

COLUMNS = ("name", "advantage", "loss", "aggregation", "KL", "extras", "paper")
_INTRODUCTION = """# Algorithms

An algorithm is a value: an advantage, a policy loss, the way in which token losses become one number, the place of
KL, and what it asks of the rollout. Each stands in a short file of `verl/algorithms/`; `algorithm.name` chooses one
(`ppo` if left out), and these keys override it:

| key | what |
|---|---|
| `algorithm.adv_estimator` | the advantage alone, by veRL's name: ESTIMATORS |
| `algorithm.clip_low`, `clip_high`, `dual_clip` | of losses that clip |
| `algorithm.gamma`, `lam` | of advantages that discount |
| `algorithm.options.<setting>` | any other setting of the preset's functions, as the table shows them |
| `algorithm.aggregation`, `aggregation_length` | from token losses to one |
| `algorithm.kl_placement`, `kl_estimator`, `kl_coefficient`, `kl_target`, `kl_horizon` | KL to the reference |
| `algorithm.entropy_coefficient`, `old_logprobs` | the entropy bonus; whose log-probs the ratio is measured from |
| `algorithm.correction.is_level`, `is_cap` | weights for what the engine sampled, truncated at `is_cap` (see below) |
| `algorithm.correction.rejection_level`, `rejection_upper`, `rejection_lower`, `token_veto` | rejected samples |
| `algorithm.filters` | which rollouts are trained on: `[truncated, {name: accuracy, high: 0.8}]`; `[]` for all |
| `algorithm.max_resample_rounds` | times that a step may draw prompts until the filters have left it enough |
| `algorithm.overlong_buffer`, `overlong_factor` | the penalty for long replies: tokens before the longest, and points |

A key that the preset has no use for is an error. Filters (`verl/algorithms/filters.py`): `zero_variance`, `accuracy`,
`grader_faults`, `length`, `truncated`, or `file.py:function` of yours. Your own algorithm is a file with an
`Algorithm` in it: `algorithm.name=mine.py:MINE`.

Rewards for single turns (`StepResult.reward` of an environment) are added to the episode's: each is paid at the last
token of its turn, the episode's at the last of all. `ppo` and `gigpo` use them; with any other algorithm they
are an error (`Algorithm.takes_turn_rewards` of your own).

Losses are sums over trained tokens whose weights are made once for a whole mini-batch: how it is cut into packs and
dealt to ranks changes nothing. Below, p is the policy, p_old the policy before the step's updates, p_ref the
reference, r a reply's reward, clip(A, x) = max(-A x, -A * (x held within 1 - low and 1 + high)), and stop() lets no
gradient through.

## Off-policy correction

Replies are sampled by an engine, which is not quite the policy that is trained: its arithmetic differs, and with
`rollout.max_staleness` above 0 its weights are older. `verl/algorithms/correction.py` holds the formulas. A token's
policy loss is multiplied by stop(min(ratio, is_cap)), where the ratio is the trainer's probability before the update by
the engine's; the loss's own ratio p / p_old is left as it is, which makes it decoupled PPO. KL, entropy and the critic
are not weighted.

- `is_level=auto`, the default, is `token` where `rollout.max_staleness` is above 0, and `none` elsewhere. `is_cap=2` is
  what veRL and the first to truncate engine ratios run: bounded variance, at the price of a small bias. An algorithm
  of your own may have a correction; each key replaces that part of it. A bound of what is not there is an error.
- `is_level=sequence` takes the product over the reply: unbiased below `is_cap`, of a variance that grows with length.
- `is_level=token rejection_level=token is_cap=5 rejection_upper=5 rejection_lower=0.5` is IcePop, `is_level=sequence
  rejection_level=sequence is_cap=3
  rejection_upper=3 rejection_lower=0` TRL's default. `mask=geometric` with bounds near 1 (1.001) leaves out replies
  that the
  trainer finds odd as a whole, however long they are. Masked tokens count on in the loss's denominators.
- `token_veto=1e-4` leaves out replies with a token that the trainer takes for ten thousand times less likely.
- `old_logprobs=rollout` measures the loss's ratio from the engine and so corrects by itself; a correction beside it is
  an error.

A step with one update needs no further pass: the update's own log-probs are those before it. `correction/engine_kl`,
`ess`, `weight_mean` and `weight_max` are told whether or not anything is corrected. veRL's keys below
`algorithm.rollout_correction.` are understood. With `rollout.top_p`, `top_k`, `min_p` or `repetition_penalty` the
engine's log-probs are those of another distribution: a correction is refused ([training.md](training.md#sampling)).

## veRL's estimators

In veRL `algorithm.adv_estimator` chooses how advantages are computed and nothing else, and so it does here: with
`adv_estimator=rloo` the loss is still the clipped one of `ppo`, over the mean of all tokens, unless `algorithm.name`
or a recipe says otherwise. `algorithm.name=rloo` is the paper's algorithm as a whole, which clips nothing and sums over
a reply. Where the formulas differ: `grpo_passk` divides by the group's std, as veRL's does
(`algorithm.norm_adv_by_std_in_grpo=false` for the paper's); `grpo` with that key false is `dr_grpo`; `gpg` scales as
in its paper, by the replies that have a gradient, where veRL counts rewards that are not 0.

## Presets

The page is made by `python -m verl.algorithms --markdown`.

"""


def told(function: Callable[..., object]) -> str:
    """A function's name with the settings that a preset binds: clipped clip_low=0.2 clip_high=0.2."""
    bound = function.keywords if isinstance(function, partial) else {}
    values = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in bound.items()}
    return " ".join([name_of(function), *(f"{name}={value}" for name, value in values.items())])


def kl_told(algorithm: Algorithm) -> str:
    """Where KL is paid, by which estimator and how much."""
    kl = algorithm.kl
    return "none" if kl.placement is KLPlacement.NONE else f"{kl.estimator} in {kl.placement}, {kl.coefficient:g}"


def extras_told(algorithm: Algorithm) -> str:
    """What it asks for beside advantage, loss and KL."""
    overlong = algorithm.overlong
    extras = {
        "critic": algorithm.needs_critic,
        "one more greedy reply": algorithm.greedy_baseline,
        "states of turns": algorithm.needs_turns,
        f"entropy bonus {algorithm.entropy_coefficient:g}": algorithm.entropy_coefficient != 0.0,
        "old log-probs of the engine": algorithm.old_logprobs is OldLogprobs.ROLLOUT,
        "off-policy correction": algorithm.correction is not None,
        f"filter {', '.join(map(told, algorithm.filters))}": bool(algorithm.filters),
        f"{algorithm.max_resample_rounds} draws": algorithm.max_resample_rounds > 1,
        "overlong penalty": overlong is not None,
    }
    if algorithm.selection is not None:
        extras[f"selects {told(algorithm.selection)}"] = True
    return ", ".join(text for text, there in extras.items() if there)


def row(algorithm: Algorithm) -> tuple[str, ...]:
    """The algorithm's cells, as COLUMNS names them."""
    return (
        algorithm.name,
        told(algorithm.advantage),
        told(algorithm.policy_loss),
        algorithm.aggregation.value,
        kl_told(algorithm),
        extras_told(algorithm),
        algorithm.paper,
    )


def presets() -> list[Algorithm]:
    """All known ones."""
    return [resolve("algorithm", name, ALGORITHMS) for name in ALGORITHMS]


def markdown() -> str:
    """The page docs/algorithms.md: the table, and what each preset's file says of it."""
    rows = [f"| {' | '.join(row(each))} |" for each in presets()]
    table = "\n".join([f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *rows])
    pages = [f"## {name}\n\n{_said_of(location)}\n" for name, location in ALGORITHMS.items()]
    estimators = ", ".join(f"`{name}`" for name in ADV_ESTIMATORS)
    return "\n".join([_INTRODUCTION.replace("ESTIMATORS", estimators) + table + "\n", *pages])


def _said_of(location: str) -> str:
    return inspect.getdoc(sys.modules[location.partition(":")[0]]) or ""
