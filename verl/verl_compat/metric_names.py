"""veRL's metric names and ours: `trainer.logger=[console,verl_names]` logs both, docs/metrics.md prints the table."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VerlName:
    """ours: the metric with the same values; "": it is logged under veRL's name alone. why: what it counts"""

    name: str
    ours: str = ""
    why: str = ""


_ALIAS = "the same"
RENAMED = (
    VerlName("actor/pg_clipfrac", "actor/clip_fraction", _ALIAS),
    VerlName("actor/pg_clipfrac_lower", "actor/dual_clip_fraction", _ALIAS),
    VerlName("actor/kl_loss", "actor/kl", _ALIAS),
    VerlName("actor/reward_kl_penalty", "kl/reference", _ALIAS),
    VerlName("actor/reward_kl_penalty_coeff", "kl/coefficient", _ALIAS),
    VerlName("critic/kl", "kl/reference", "the same, in early versions of veRL"),
    VerlName("critic/kl_coeff", "kl/coefficient", "the same, in early versions of veRL"),
    VerlName("critic/vf_loss", "critic/loss", _ALIAS),
    VerlName("critic/vf_clipfrac", "critic/clip_fraction", _ALIAS),
    VerlName("critic/vf_explained_var", "critic/explained_variance", _ALIAS),
    VerlName("critic/format_score/mean", "reward/format", "ToolRL's part of the reward"),
    VerlName("critic/correctness_score/mean", "reward/correctness", "ToolRL's part of the reward"),
    VerlName("critic/length_score/mean", "reward/length", "ToolRL's part of the reward"),
    VerlName("timing_s/step", "time/step_s", "without validation and checkpoint, which veRL includes"),
    VerlName("timing_s/gen", "time/rollout_s", "with the reward, which veRL counts as `reward`"),
    VerlName("timing_s/adv", "time/advantage_s", _ALIAS),
    VerlName("timing_s/update_actor", "time/update_s", "with the critic's updates"),
    VerlName("timing_s/update_weights", "time/weight_sync_s", _ALIAS),
    VerlName("perf/time_per_step", "time/step_s", "as `timing_s/step`"),
)
COMPUTED = (
    VerlName("actor/pg_loss", why="the policy loss, as `actor/loss`; not logged if entropy or KL is part of that"),
    VerlName("critic/score/<stat>", why="mean, max, min: rewards of the trained responses; the mean is `reward/total`"),
    VerlName("critic/rewards/<stat>", why="the same, minus the KL penalty if it is in the reward"),
    VerlName("critic/advantages/<stat>", why="over the trained tokens"),
    VerlName("critic/returns/<stat>", why="over the trained tokens, if there is a critic"),
    VerlName("critic/values/<stat>", why="over the trained tokens; the mean is `critic/values_mean`"),
    VerlName("response_length/min", why="tokens of the policy, as `response_length/mean`"),
    VerlName("prompt_length/<stat>", why="tokens of the first prompt"),
    VerlName("prompt_length/clip_ratio", why="share of prompts of `data.max_prompt_length` tokens"),
    VerlName("perf/total_num_tokens", why="of all samples, prompts included"),
    VerlName("perf/throughput", why="tokens per second and device"),
    VerlName("training/global_step", why="the number of completed steps"),
    VerlName("val-core/<data_source>/reward/mean@<n>", why="mean reward of a data source in validation"),
    VerlName("val/test_score/<data_source>", why="the same, as ToolRL's trainer names it"),
)
EQUAL = (
    VerlName("actor/entropy", "actor/entropy", "of the update; in veRL of the pass before it"),
    VerlName("actor/grad_norm", "actor/grad_norm", _ALIAS),
    VerlName("actor/lr", "actor/lr", _ALIAS),
    VerlName("actor/ppo_kl", "actor/ppo_kl", _ALIAS),
    VerlName("critic/grad_norm", "critic/grad_norm", _ALIAS),
    VerlName("critic/lr", "critic/lr", _ALIAS),
    VerlName("response_length/mean", "response_length/mean", "without observations, which veRL counts"),
    VerlName("response_length/max", "response_length/max", "without observations, which veRL counts"),
    VerlName("response_length/clip_ratio", "response_length/clip_ratio", "responses that a limit ended"),
)
ABSENT = (
    VerlName("num_turns/<stat>", "tools/turns_mean", "ours counts assistant turns, veRL's those of both sides"),
    VerlName("timing_s/old_log_prob", "time/score_s", "ours covers old and reference log-probs and values"),
    VerlName("timing_s/ref", "time/score_s", "as `timing_s/old_log_prob`"),
    VerlName("timing_s/values", "time/score_s", "as `timing_s/old_log_prob`"),
    VerlName("timing_per_token_ms/<phase>", "perf/<phase>_tokens_per_s", "ours is a rate"),
    VerlName("perf/mfu/actor", "perf/mfu", "of the update, by the devices' peak"),
    VerlName("val-aux/<data_source>/<metric>", "val/<set>/<part>", "best@n and maj@n: `toolrl eval`"),
    VerlName("rollout_corr/<metric>", "correction/<metric>", "docs/algorithms.md"),
)


def renamed(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that veRL logs with the same values, under its names."""
    return {each.name: metrics[each.ours] for each in RENAMED if each.ours in metrics}
