"""Every metric's name, unit and meaning, for docs/metrics.md; `toolrl metrics` lists them.

A term in angle brackets is a placeholder for a name of the run: a data set, a part of the reward, a phase.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from verl.host.arguments import Arguments

STDERR = "_stderr"  # ends the names of standard errors


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    unit: str
    meaning: str


METRICS = (
    Metric("reward/total", "points", "mean reward of the step's responses, before reward shaping within the group"),
    Metric("reward/<part>", "points", "mean of one named part of the reward"),
    Metric("reward/<data_source>/total", "points", "mean reward of the responses to one data source"),
    Metric("reward/<data_source>/<part>", "points", "mean of one part over the responses to one data source"),
    Metric("reward/turns", "points", "mean sum of an environment's per-turn rewards, if any"),
    Metric("reward/zero_variance_groups", "share", "groups whose rewards are all equal, so their advantages are zero"),
    Metric("reward/infrastructure_faults", "count", "responses dropped for an infrastructure fault; never scored 0"),
    Metric("reward/over_limit", "count", "responses over reward.timeout_s or memory_mib, scored as empty"),
    Metric("reward/swe/<stage>_s", "s", "mean time of an agent in a stage of env.name=swe: starting, running, scoring"),
    Metric("reward/swe/<stage>_wait_s", "s", "mean wait for a slot of the stage; starting includes that for running"),
    Metric("reward/swe/engine_s", "s", "mean time in which an agent waits for responses of the engine"),
    Metric("reward/swe/engine_share", "share", "the same as a share of the running stage; the rest is for tools"),
    Metric("response_length/mean", "tokens", "mean response length per episode, over all turns and segments"),
    Metric("response_length/max", "tokens", "maximum response length"),
    Metric("response_length/clip_ratio", "share", "responses truncated at the length limit"),
    Metric("segments/mean", "1", "mean segments per episode, if any has several (algorithms.md)"),
    Metric("segments/max", "1", "maximum segments per episode"),
    Metric("agent/requests", "1", "mean requests of an agent per episode (agents.md)"),
    Metric("agent/segments", "1", "mean segments of an agent's episode"),
    Metric("agent/retries", "1", "mean requests per episode that got the response of an earlier one"),
    Metric("agent/undelivered", "1", "mean responses per episode that never reached the agent: not trained"),
    Metric("agent/sampling_overridden", "1", "mean requests per episode whose sampling settings were replaced"),
    Metric("reward/overlong_penalty", "points", "mean overlong penalty, if the algorithm has one; 0 or negative"),
    Metric("filter/kept", "share", "rollouts kept by the algorithm's filters, of all rollouts of the step"),
    Metric("filter/<filter>", "share", "rollouts dropped by one filter"),
    Metric("filter/resample_rounds", "count", "rounds of prompts that the step drew until it had enough groups"),
    Metric("staleness/mean", "versions", "mean age of the weights at the start of a rollout, if max_staleness > 0"),
    Metric("staleness/max", "versions", "maximum age; at most rollout.max_staleness"),
    Metric("staleness/depth", "steps", "prompt lookahead: 1, raised within the limit while steps wait for rollouts"),
    Metric("staleness/reused", "share", "groups that an earlier step also trained on"),
    Metric("tools/turns_mean", "1", "mean assistant turns per episode"),
    Metric("tools/calls_mean", "1", "mean tool calls per episode"),
    Metric("tools/turn_limit_rate", "share", "episodes that env.max_turns or env.max_tool_calls ended"),
    Metric("tools/usage_rate", "share", "episodes with a tool call (for a code tool: the code ratio)"),
    Metric("tools/usage_rate_correct", "share", "the same among correct episodes, if the reward defines correctness"),
    Metric("tools/parse_errors_mean", "1", "mean tool-call parse errors per episode"),
    Metric("tools/success", "share", "successful calls"),
    Metric("tools/user_error", "share", "calls that failed by the policy's fault: wrong arguments, code that raises"),
    Metric("tools/timeout", "share", "calls that timed out"),
    Metric("tools/unavailable", "share", "calls whose service was unavailable, including those of retried episodes"),
    Metric("tools/repeats", "count", "attempts at episodes that were repeated because a service failed"),
    Metric("tools/<tool>/seconds_mean", "s", "mean duration of one tool's calls"),
    Metric("actor/loss", "1", "policy loss, mean over the step's optimizer steps"),
    Metric("actor/grad_norm", "1", "norm of the gradient before clipping"),
    Metric("actor/lr", "1", "learning rate"),
    Metric("actor/entropy", "nats", "token mean of the entropy at the rollout's temperature"),
    Metric("actor/entropy_coefficient", "1", "coefficient of the entropy bonus (algorithm.entropy_target)"),
    Metric("actor/teacher_kl", "nats", "token mean of the KL divergence to the teacher (teacher.top_k)"),
    Metric("actor/computed_share", "share", "samples computed in the update; the others had zero advantage"),
    Metric("actor/clip_fraction", "share", "tokens at which the clip was active (veRL's pg_clipfrac)"),
    Metric("actor/dual_clip_fraction", "share", "tokens at which the dual clip was active"),
    Metric(
        "actor/selected_fraction",
        "share",
        "tokens selected by the algorithm (Clip-Cov, KL-Cov, high entropy, VAPO)",
    ),
    Metric("actor/observation_loss", "nats", "mean -log p of observation tokens (algorithm.observation_coefficient)"),
    Metric("actor/observation_tokens", "count", "tokens in it per optimizer step: its denominator"),
    Metric("actor/off_policy_fraction", "share", "tokens of samples left out because the policy has left them (OPSM)"),
    Metric("actor/ppo_kl", "nats", "token mean of log p_old - log p: size of the step's policy change"),
    Metric("actor/kl", "nats", "token mean of the KL estimate to the reference, if KL is in the loss"),
    Metric("critic/loss", "1", "value loss"),
    Metric("critic/grad_norm", "1", "norm of the gradient before clipping"),
    Metric("critic/lr", "1", "learning rate"),
    Metric("critic/clip_fraction", "share", "tokens at which the value clip was active"),
    Metric("critic/values_mean", "points", "token mean of the values before the update"),
    Metric("critic/explained_variance", "1", "1 - Var(returns - values) / Var(returns); 1 is perfect, 0 a constant"),
    Metric("engine/logprob_diff_mean", "nats", "mean absolute difference of the trainer's and the engine's log p"),
    Metric("engine/logprob_diff_max", "nats", "maximum of the same"),
    Metric("engine/kl", "nats", "token mean of log p by the engine - log p by the trainer; biased by top_p etc."),
    Metric("correction/engine_kl", "nats", "token mean of k3 for KL(engine, trainer), before the update"),
    Metric("correction/ess", "share", "effective sample size of the importance weights; 1 if all are equal"),
    Metric("correction/weight_mean", "1", "mean importance weight"),
    Metric("correction/weight_max", "1", "maximum importance weight"),
    Metric("correction/truncated", "share", "tokens whose ratio was above is_cap"),
    Metric("correction/masked", "share", "tokens rejected by the bounds or the veto"),
    Metric("engine/canary_logprob_diff", "nats", "mean absolute log p difference on a fixed probe after weight sync"),
    Metric("engine/merged_share", "share", "what rounding leaves of an adapter's update, with lora.sync=merged"),
    Metric("rollout/engine_restarts", "count", "lost engines replaced since the last step"),
    Metric("rollout/requests_retried", "count", "requests retried since then because their engine was lost"),
    Metric("rollout/prompt_tokens", "count", "prompt tokens of all requests since then; each turn's are its context"),
    Metric("rollout/cached_tokens", "count", "of these, those that the engine had in its prefix cache"),
    Metric("rollout/draft_tokens", "count", "tokens drafted since then, with rollout.speculation"),
    Metric("rollout/accepted_tokens", "count", "of these, accepted: forward passes of one response that were saved"),
    Metric("collapse/triggered_rules", "count", "collapse rules triggered in this step (docs/collapse.md)"),
    Metric("kl/reference", "nats", "token mean of the KL estimate to the reference, if KL is in the reward"),
    Metric("kl/demonstrated", "share", "samples with a demonstration in the prompt of a policy that teaches itself"),
    Metric("kl/teacher", "nats", "token mean of log p - log p_teacher: the reverse KL to the teacher, if there is one"),
    Metric("kl/coefficient", "1", "coefficient of the KL penalty"),
    Metric("val/<set>/total", "points", "mean reward of the responses to a validation set (rollout.val_kwargs)"),
    Metric("val/<set>/exact", "share", "responses with the maximum reward"),
    Metric(f"val/<set>/total{STDERR}", "points", "standard error of total, over the tasks"),
    Metric(f"val/<set>/exact{STDERR}", "share", "standard error of exact, over the tasks"),
    Metric("val/<set>/<data_source>/total", "points", "total of one data source of the set, if there are several"),
    Metric("val/<set>/<data_source>/exact", "share", "exact of one data source; both have a standard error, too"),
    Metric("val/<set>/<part>", "points", "mean of one named part of the reward"),
    Metric("eval/<category>/score", "share", "score of a benchmark category or aggregate, greedy (docs/evaluation.md)"),
    Metric(f"eval/<category>/score{STDERR}", "share", "standard error of the score, by a bootstrap over the tasks"),
    Metric("eval/<category>/missing", "count", "tasks that could not be judged, excluded from the score"),
    Metric("val/demonstrations/loss", "nats", "token mean of -log p over the validation demonstrations (toolrl sft)"),
    Metric("val/pairs/loss", "1", "DPO's loss of the validation pairs (sft.loss=dpo); margin and accuracy likewise"),
    Metric("dpo/margin", "1", "mean of the chosen responses' implicit rewards, minus that of the rejected ones"),
    Metric("dpo/accuracy", "share", "pairs whose chosen response has the higher implicit reward, before the update"),
    Metric("dpo/chosen", "1", "mean implicit reward of chosen responses: beta * (log p - log p_ref)"),
    Metric("dpo/rejected", "1", "the same of rejected responses"),
    Metric("time/<phase>_s", "s", "wall time of one phase of the step"),
    Metric("time/<phase>_cpu_s", "s", "CPU time of the controller process in it, without worker processes"),
    Metric("time/step_s", "s", "wall time of the step"),
    Metric("time/overhead_s", "s", "wall time of the step outside every phase"),
    Metric("perf/rollout_tokens_per_s", "tokens/s", "generated tokens per second of the rollout phase"),
    Metric("perf/update_tokens_per_s", "tokens/s", "tokens in the update, prompts included, per second of that phase"),
    Metric("perf/tokens_per_s", "tokens/s", "tokens of all samples, prompts included, per second of the step"),
    Metric("perf/mfu", "share", "model FLOPs utilization of the update: its FLOP/s by the devices' peak"),
    Metric("memory/checkpointed_layers", "layers", "recomputed in an update (`model.enable_gradient_checkpointing`)"),
    Metric("memory/trainer_gib", "GiB", "peak memory of the largest training rank: device memory; resident on CPU"),
    Metric("memory/driver_gib", "GiB", "resident memory of the controller process"),
)
_FIXED = frozenset(metric.name for metric in METRICS)


def reward_parts(metrics: Mapping[str, float]) -> dict[str, float]:
    """Part -> value, of the metrics that match reward/<part> only."""
    parts = {name: value for name, value in metrics.items() if re.fullmatch("reward/[^/]+", name)}
    return {name.removeprefix("reward/"): value for name, value in parts.items() if name not in _FIXED}


def arguments() -> Arguments:
    return Arguments("toolrl metrics", "List all metrics: toolrl metrics")


if __name__ == "__main__":
    arguments().read(None)
    sys.stdout.writelines(f"{metric.name:34} {metric.unit:8} {metric.meaning}\n" for metric in METRICS)
