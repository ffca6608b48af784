"""The components of every preset: the table of `python -m verl.algorithms` and the page docs/algorithms.md."""

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

An algorithm is a value: an advantage estimator, a policy loss, a loss aggregation, the placement of KL, and what it
needs of the rollout. `algorithm.name` selects one of the [presets](#presets), each a short file; the default is `ppo`.

```bash
toolrl train recipe=mini_grpo algorithm.name=gspo algorithm.clip_high=0.001
```

```mermaid
flowchart LR
    scores[scores of a group] --> filters[filters<br>rejection sampling] --> advantage[advantage<br>estimator]
    advantage --> loss[policy loss<br>per token] --> aggregation --> step[optimizer step]
    correction[off-policy<br>correction] --> loss
    kl[KL to the reference] --> loss
```

These keys override a preset. A key that it does not use is an error.

| key | meaning |
|---|---|
| `algorithm.adv_estimator` | the advantage estimator only, by veRL's name: ESTIMATORS |
| `algorithm.clip_low`, `clip_high`, `dual_clip` | the clip ratio, for losses that clip |
| `algorithm.gamma`, `lam` | discount and GAE lambda, for advantages that use them |
| `algorithm.options.<setting>` | any other setting of the preset's functions, as shown in the table |
| `algorithm.aggregation`, `aggregation_length` | loss aggregation over tokens and samples |
| `algorithm.kl_placement`, `kl_estimator`, `kl_coefficient`, `kl_target`, `kl_horizon` | KL to the reference |
| `algorithm.entropy_coefficient`, `old_logprobs` | the entropy bonus; the source of the ratio's old log-probs |
| `algorithm.correction.is_level`, `is_cap` | importance sampling weights, truncated at `is_cap` (see below) |
| `algorithm.correction.rejection_level`, `rejection_upper`, `rejection_lower`, `token_veto` | rejection sampling |
| `algorithm.filters` | which rollouts are trained on: `[truncated, {name: accuracy, high: 0.8}]`; `[]` for all |
| `algorithm.max_resample_rounds` | rounds of prompts that a step may draw until enough groups pass the filters |
| `algorithm.overlong_buffer`, `overlong_factor` | overlong penalty: tokens before the limit, penalty at the limit |

Filters (`verl/algorithms/filters.py`) are `zero_variance`, `accuracy`, `grader_faults`, `length`, `truncated`, or your
own `file.py:function`. Your own algorithm is a file with an `Algorithm` in it: `algorithm.name=mine.py:MINE`
([quickstart](quickstart/algorithm.md)).

Per-turn rewards (`StepResult.reward` of an environment) are added to the episode's. Each goes to the last token of its
turn, the episode's to the last token of all. `ppo` and `gigpo` use them. With any other algorithm they are an error;
set `Algorithm.takes_turn_rewards` in your own.

Losses are sums over trained tokens, with weights that are computed once per mini-batch. So its split into packs and
over ranks changes nothing. In the formulas below

- p is the policy, p_old the policy before the step's updates, and p_ref the reference;
- r is a response's reward;
- clip(A, x) = max(-A x, -A * (x clipped to 1 - low .. 1 + high));
- stop() stops the gradient.

## Off-policy correction

Responses are sampled by an engine that differs slightly from the policy being trained. Its numerics differ, and with
`rollout.max_staleness` above 0 its weights are older. `verl/algorithms/correction.py` holds the formulas.

A token's policy loss is multiplied by stop(min(ratio, is_cap)). The ratio is the trainer's probability before the
update, divided by the engine's. The loss's own ratio p / p_old is unchanged, which makes it decoupled PPO. KL, entropy
and the critic's loss are not weighted.

| setting, below `algorithm.correction.` | effect |
|---|---|
| `is_level=auto` | the default: `token` if `rollout.max_staleness` is above 0, else `none` |
| `is_level=token` | a weight per token, truncated at `is_cap`: bounded variance, a small bias |
| `is_level=sequence` | the product over the response: unbiased below `is_cap`; its variance grows with length |
| `is_cap` | 2 by default, as in veRL and in the first work on truncated engine ratios |
| `rejection_level=geometric` | with bounds near 1 (1.001): rejects off-policy responses independently of their length |
| `token_veto=1e-4` | rejects responses with a token that is ten thousand times less likely under the trainer |

- IcePop is `is_level=token rejection_level=token is_cap=5 rejection_upper=5 rejection_lower=0.5`.
- TRL's default is `is_level=sequence rejection_level=sequence is_cap=3 rejection_upper=3 rejection_lower=0`.
- Rejected tokens still count in the loss's denominators.
- Your own algorithm may have a correction; each key replaces that part of it. A bound without its level is an error.
- `algorithm.old_logprobs=rollout` takes the engine's log-probs as the ratio's denominator. That is a correction by
  itself; an additional one is an error.

A step with one update needs no extra forward pass: the update's own log-probs are those before it.
`correction/engine_kl`, `ess`, `weight_mean` and `weight_max` are logged with and without a correction. veRL's keys
below `algorithm.rollout_correction.` are supported. With `rollout.top_p`, `top_k`, `min_p` or `repetition_penalty` the
engine's log-probs are those of another distribution: a correction is refused ([training.md](training.md#sampling)).

## veRL's estimators

In veRL `algorithm.adv_estimator` selects how advantages are computed and nothing else, and so it does here. With
`adv_estimator=rloo` the loss is still the clipped one of `ppo` with a token mean, unless `algorithm.name` or a recipe
overrides it. `algorithm.name=rloo` is the paper's complete algorithm, which clips nothing and sums over the response's
tokens. Where the formulas differ:

- `grpo_passk` divides by the group's std, as in veRL. `algorithm.norm_adv_by_std_in_grpo=false` selects the paper's.
- `grpo` with that key false is `dr_grpo`.
- `gpg` scales as in its paper, by the number of responses with a gradient. veRL counts nonzero rewards.

## Presets

This page is generated by `toolrl algorithms --markdown`.

"""


def describe(function: Callable[..., object]) -> str:
    """A function's name and the settings bound by the preset: clipped clip_low=0.2 clip_high=0.2."""
    bound = function.keywords if isinstance(function, partial) else {}
    values = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in bound.items()}
    return " ".join([name_of(function), *(f"{name}={value}" for name, value in values.items())])


def describe_kl(algorithm: Algorithm) -> str:
    """KL estimator, placement and coefficient."""
    kl = algorithm.kl
    return "none" if kl.placement is KLPlacement.NONE else f"{kl.estimator} in {kl.placement}, {kl.coefficient:g}"


def describe_extras(algorithm: Algorithm) -> str:
    """Components besides advantage, loss and KL."""
    overlong = algorithm.overlong
    extras = {
        "critic": algorithm.needs_critic,
        "greedy baseline response": algorithm.greedy_baseline,
        "turn states": algorithm.needs_turns,
        f"entropy bonus {algorithm.entropy_coefficient:g}": algorithm.entropy_coefficient != 0.0,
        "engine's old log-probs": algorithm.old_logprobs is OldLogprobs.ROLLOUT,
        "off-policy correction": algorithm.correction is not None,
        f"filter {', '.join(map(describe, algorithm.filters))}": bool(algorithm.filters),
        f"{algorithm.max_resample_rounds} resample rounds": algorithm.max_resample_rounds > 1,
        "overlong penalty": overlong is not None,
    }
    if algorithm.selection is not None:
        extras[f"token selection {describe(algorithm.selection)}"] = True
    return ", ".join(text for text, present in extras.items() if present)


def row(algorithm: Algorithm) -> tuple[str, ...]:
    """The algorithm's table cells, in the order of COLUMNS."""
    return (
        algorithm.name,
        describe(algorithm.advantage),
        describe(algorithm.policy_loss),
        algorithm.aggregation.value,
        describe_kl(algorithm),
        describe_extras(algorithm),
        algorithm.paper,
    )


def presets() -> list[Algorithm]:
    """All presets."""
    return [resolve("algorithm", name, ALGORITHMS) for name in ALGORITHMS]


def markdown() -> str:
    """The page docs/algorithms.md: the table, and the module docstring of each preset."""
    rows = [f"| {' | '.join(row(each))} |" for each in presets()]
    table = "\n".join([f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *rows])
    pages = [f"## {name}\n\n{_module_docstring(location)}\n" for name, location in ALGORITHMS.items()]
    estimators = ", ".join(f"`{name}`" for name in ADV_ESTIMATORS)
    return "\n".join([_INTRODUCTION.replace("ESTIMATORS", estimators) + table + "\n", *pages])


def _module_docstring(location: str) -> str:
    return inspect.getdoc(sys.modules[location.partition(":")[0]]) or ""
