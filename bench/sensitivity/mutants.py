"""Thirty-three mutants of estimators, losses, packing, layers with state and ToolRL's reward."""

from __future__ import annotations

from bench.sensitivity.planting import Edit, Mistake

_ESTIMATORS, _LOSSES = "verl/algorithms/estimators", "verl/algorithms/losses"
_ADVANTAGE = f"{_ESTIMATORS}/advantage.py"
_REWARDS = "verl/utils/reward_score"


def _mutant(folder: str, name: str, wrong: str, file: str, old: str, new: str) -> Mistake:
    return Mistake(name, wrong, (Edit(file, old, new),), (folder,))


def _of_algorithms(name: str, wrong: str, file: str, old: str, new: str) -> Mistake:
    return _mutant("tests/verl/algorithms", name, wrong, file, old, new)


def _of_batch(name: str, wrong: str, file: str, old: str, new: str) -> Mistake:
    return _mutant("tests/verl/batch", name, wrong, f"verl/batch/{file}", old, new)


def _of_reward(name: str, wrong: str, file: str, old: str, new: str) -> Mistake:
    return _mutant(f"tests/{_REWARDS}", name, wrong, file, old, new)


def _of_state(name: str, wrong: str, old: str, new: str) -> Mistake:
    return _mutant("tests/verl/workers/test_state.py", name, wrong, "verl/workers/state.py", old, new)


MUTANTS = (
    _of_algorithms(
        "biased_std",
        "GRPO divides by the biased standard deviation.",
        _ADVANTAGE,
        "(exact_G.std() + _EPSILON)",
        "(exact_G.std(unbiased=False) + _EPSILON)",
    ),
    _of_algorithms(
        "epsilon_outside",
        "GRPO adds its epsilon to the quotient.",
        _ADVANTAGE,
        "centered_G / (exact_G.std() + _EPSILON) if",
        "centered_G / exact_G.std() + _EPSILON if",
    ),
    _of_algorithms(
        "equal_rewards_as_any",
        "Equal rewards do not give exactly zero.",
        _ADVANTAGE,
        "if bool((rewards_G == rewards_G[0]).all()):",
        "if rewards_G.numel() == 0:",
    ),
    _of_algorithms(
        "unordered_groups",
        "Estimates stay in the order of the groups, not of the episodes.",
        _ADVANTAGE,
        "    estimates_N[order_N] = torch.cat(",
        "    estimates_N[:] = torch.cat(",
    ),
    _of_algorithms(
        "bootstrapped_end",
        "GAE takes the last value as that of the state after the end.",
        _ADVANTAGE,
        "torch.cat([values_L[1:], values_L.new_zeros(1)])",
        "torch.cat([values_L[1:], values_L[-1:]])",
    ),
    _of_algorithms(
        "gae_without_lambda",
        "GAE discounts by gamma alone.",
        _ADVANTAGE,
        "raw.append(returns_to_go(deltas_L, gamma * own))",
        "raw.append(returns_to_go(deltas_L, gamma))",
    ),
    _of_algorithms(
        "whitened_by_variance",
        "Whitening divides by the variance.",
        _ADVANTAGE,
        "torch.rsqrt(variance)",
        "torch.reciprocal(variance)",
    ),
    _of_algorithms(
        "leave_one_out_inverted",
        "RLOO scales by (n - 1) / n.",
        f"{_ESTIMATORS}/rloo.py",
        "(n / max(n - 1, 1))",
        "(max(n - 1, 1) / n)",
    ),
    _of_algorithms(
        "gpg_without_clamp",
        "GPG divides by zero where no reward differs.",
        f"{_ESTIMATORS}/gpg.py",
        "nonzero_B.sum().clamp(min=1)",
        "nonzero_B.sum()",
    ),
    _of_algorithms(
        "opo_without_lengths",
        "OPO's baseline is the plain mean.",
        f"{_ESTIMATORS}/opo.py",
        "(lengths_G * shifted_G).sum() / lengths_G.sum()",
        "shifted_G.mean()",
    ),
    _of_algorithms(
        "lone_turn_compared",
        "A turn without another to compare it with has its return as advantage.",
        _ADVANTAGE,
        "torch.zeros_like(returns_G) if returns_G.numel() == 1 else group_normalized(returns_G, divide_by_std)",
        "group_normalized(returns_G, divide_by_std)",
    ),
    _of_algorithms(
        "optimistic_clip",
        "The surrogate is the smaller of the two losses.",
        f"{_LOSSES}/policy_loss.py",
        "torch.maximum(plain_T, bounded_T), ratio_T, clip_fraction",
        "torch.minimum(plain_T, bounded_T), ratio_T, clip_fraction",
    ),
    _of_algorithms(
        "exchanged_clip",
        "The bounds of the clip are exchanged.",
        f"{_LOSSES}/policy_loss.py",
        "ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)",
        "ratio_T.clamp(1.0 - clip_high, 1.0 + clip_low)",
    ),
    _of_algorithms(
        "dual_clip_of_gains",
        "The dual clip is applied where the advantage is positive.",
        f"{_LOSSES}/policy_loss.py",
        "(inputs.advantages_T < 0)",
        "(inputs.advantages_T > 0)",
    ),
    _of_algorithms(
        "ratio_of_the_pack",
        "GSPO's ratio is the mean over all tokens of a pack, not over those of a sample.",
        f"{_LOSSES}/gspo.py",
        "sample_means(log_ratio_T.detach(), inputs.sample_T)",
        "log_ratio_T.detach().mean()",
    ),
    _of_algorithms(
        "reversed_k3",
        "k3 has the ratio the wrong way round.",
        "verl/algorithms/kl.py",
        "log_ratio_T = (ref_logprobs_T - logprobs_T)",
        "log_ratio_T = (logprobs_T - ref_logprobs_T)",
    ),
    _of_algorithms(
        "clipped_value_alone",
        "The value loss is that of the clipped value, even where the other is larger.",
        f"{_LOSSES}/ppo.py",
        "0.5 * torch.maximum(plain_T, bounded_T)",
        "0.5 * bounded_T",
    ),
    _of_algorithms(
        "rejected_tokens_stay",
        "Rejected tokens keep their weight.",
        "verl/algorithms/correction.py",
        "ratio_T.clamp(max=correction.is_cap).masked_fill(masked_T, 0.0)",
        "ratio_T.clamp(max=correction.is_cap)",
    ),
    _of_algorithms(
        "empty_episodes_count",
        "Episodes without trained tokens count in the mean.",
        "verl/algorithms/aggregate.py",
        "num_episodes = has_tokens_E.sum().clamp(min=1)",
        "num_episodes = torch.ones_like(has_tokens_E).sum().clamp(min=1)",
    ),
    _of_batch(
        "split_when_full",
        "A unit that fits exactly is split.",
        "packing.py",
        "if taken and num_tokens + own > max_tokens:",
        "if taken and num_tokens + own >= max_tokens:",
    ),
    _of_batch(
        "positions_from_zero",
        "The positions of a response do not continue those of its prompt.",
        "packing.py",
        "start = add(own, unit.prefix, shared)",
        "start = add(own, 0, shared)",
    ),
    _of_batch(
        "source_past_the_prefix",
        "The first token after a shared prefix is looked for in the prefix.",
        "packing.py",
        "np.where(before < prefix, ",
        "np.where(before <= prefix, ",
    ),
    _of_batch(
        "exchanged_columns",
        "The log-probs of the reference are those of the old policy.",
        "packing.py",
        "ref_logprobs=_column(batch.ref_logprobs, place_A)",
        "ref_logprobs=_column(batch.old_logprobs, place_A)",
    ),
    _of_batch(
        "inputs_to_the_last",
        "The last trained token of a sample is counted among its inputs.",
        "token_batch.py",
        "trained[bounds.trained[1:] - 1] - bounds.tokens[:-1], 0)",
        "trained[bounds.trained[1:] - 1] - bounds.tokens[:-1] + 1, 0)",
    ),
    _of_reward(
        "late_second_stage",
        "The second stage of the format begins one step late.",
        f"{_REWARDS}/rlla.py",
        "if options.two_stage and step >= 30 else",
        "if options.two_stage and step > 30 else",
    ),
    _of_reward(
        "unbounded_length",
        "The length part has no upper bound.",
        f"{_REWARDS}/rlla.py",
        "min(round(count / full_length(options, step), 2), 1.0)",
        "round(count / full_length(options, step), 2)",
    ),
    _of_reward(
        "absent_as_null",
        "A gold parameter with the value null is matched by its absence.",
        f"{_REWARDS}/matching.py",
        "if key in given and given[key] == value)",
        "if given.get(key) == value)",
    ),
    _of_reward(
        "ties_to_the_last",
        "Of equally similar predictions the last is taken.",
        f"{_REWARDS}/matching.py",
        "if value > best:",
        "if value >= best:",
    ),
    _of_reward(
        "tags_at_least_once",
        "A tag may occur more than once.",
        "verl/formats/toolrl_text.py",
        "any(response.count(tag) != 1 for tag in once)",
        "any(response.count(tag) < 1 for tag in once)",
    ),
    _of_reward(
        "first_turn",
        "The first assistant turn of a text is scored, not the last.",
        "verl/formats/toolrl_text.py",
        "start = text.rfind(header) if header else -1",
        "start = text.find(header) if header else -1",
    ),
    _of_state(
        "border_ignored",
        "A layer's state goes on from one sequence of a pack to the next.",
        "(State(), None) if segment.prefix is None else ends[segment.prefix]",
        "ends[-1] if ends else (State(), None)",
    ),
    _of_state(
        "tail_ignored",
        "A response's convolution does not see the end of its prompt.",
        "self.conv_states[state_idx] = inputs[..., -conv_kernel_size:]",
        "self.conv_states[state_idx] = inputs[..., :0]",
    ),
    _of_state(
        "state_detached",
        "A prompt gets no gradient through the state that its responses continue.",
        "self.recurrent_states[state_idx] = recurrent_states",
        "self.recurrent_states[state_idx] = recurrent_states.detach()",
    ),
)
