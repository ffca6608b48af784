"""Fifteen mistakes in the trainer, each of which runs without an error and makes learning worse or other."""

from __future__ import annotations

from bench.sensitivity.planting import Edit, Mistake

_SAMPLES = "verl/batch/samples.py"
_ROLLOUTS = "verl/episodes/manager.py"
_WORKER = "verl/workers/policy_worker.py"

MISTAKES = (
    Mistake(
        "flipped_advantages",
        "The advantages of every tenth episode have the wrong sign.",
        (
            Edit(
                "verl/batch/experience.py",
                "    estimate = algorithm.advantage(inputs)\n",
                "    estimate = algorithm.advantage(inputs)\n"
                "    flipped = [-each if row % 10 == 9 else each for row, each in enumerate(estimate.advantages)]\n"
                "    estimate = replace(estimate, advantages=flipped)\n",
            ),
        ),
        ("tests/verl/batch",),
    ),
    Mistake(
        "shifted_advantages",
        "Every episode has the advantage of the one before it.",
        (
            Edit(
                "verl/algorithms/estimators/advantage.py",
                "rollouts.broadcast_to_tokens(apply_per_group(rollouts.group_B, estimate, rollouts.rewards))",
                "rollouts.broadcast_to_tokens(apply_per_group(rollouts.group_B, estimate, rollouts.rewards).roll(1))",
            ),
        ),
        ("tests/verl/algorithms",),
    ),
    Mistake(
        "late_mask",
        "The loss mask begins one token late: the first token of every response is not trained.",
        (
            Edit(
                _SAMPLES,
                "untrained_T = np.where(observed_T, 0, context_T)",
                "untrained_T = np.where(observed_T, 0, context_T + np.minimum(written_T, 1))",
            ),
            Edit(
                _SAMPLES,
                "        yield turn.completion.logprobs\n",
                "        yield turn.completion.logprobs[0 if trained else 1 :]\n",
            ),
        ),
        ("tests/verl/batch",),
    ),
    Mistake(
        "untrained_end",
        "The last token of every response, which ends the turn, is not trained.",
        (
            Edit(
                _SAMPLES,
                "    trained_T = context_T + written_T - untrained_T\n",
                "    ends_T = np.minimum(written_T, 1)\n    trained_T = context_T + written_T - untrained_T - ends_T\n",
            ),
            Edit(_SAMPLES, "np.tile([False, True], len(turns))", "np.tile([False, True, False], len(turns))"),
            Edit(
                _SAMPLES,
                "np.stack([untrained_T, trained_T], axis=1)",
                "np.stack([untrained_T, trained_T, ends_T], axis=1)",
            ),
            Edit(_SAMPLES, "        yield turn.completion.logprobs\n", "        yield turn.completion.logprobs[:-1]\n"),
        ),
        ("tests/verl/batch",),
    ),
    Mistake(
        "trained_observations",
        "The results of tools are trained as if the policy had written them.",
        (Edit(_SAMPLES, "np.full(len(turns), train_on_observations)", "np.full(len(turns), True)"),),
        ("tests/verl/batch",),
    ),
    Mistake(
        "loss_by_pack",
        "The loss is divided by the weights of its pack, not by those of the batch.",
        (
            Edit(
                _WORKER,
                "    weighted_A = loss_A * weight_A\n",
                "    weighted_A = loss_A * weight_A / weight_A.sum()\n",
            ),
        ),
        ("tests/verl/workers", "tests/verl/trainer/test_train_step.py"),
    ),
    Mistake(
        "doubled_rank",
        "The gradients of the second rank are counted twice.",
        (
            Edit(
                "verl/workers/fsdp_engine.py",
                "(value * self._mesh.size()).backward()",
                "(value * self._mesh.size() * (2 if self.rank == 1 else 1)).backward()",
            ),
        ),
        ("tests/verl/workers",),
    ),
    Mistake(
        "tenfold_kl",
        "The KL loss has ten times its coefficient.",
        (
            Edit(
                _WORKER,
                "loss_A = loss_A + algorithm.kl.coefficient * divergence_A",
                "loss_A = loss_A + 10 * algorithm.kl.coefficient * divergence_A",
            ),
        ),
        ("tests/verl/workers",),
    ),
    Mistake(
        "stale_weights",
        "The engines get the weights of every fifth update, and no correction: rollouts are up to 4 versions stale.",
        (
            Edit(
                "verl/trainer/weight_sync.py",
                "        with self.engine.paused():\n            await self.push(version)\n",
                "        if self.version is not None and version % 5:\n            return 0.0\n"
                "        with self.engine.paused():\n            await self.push(version)\n",
            ),
        ),
        ("tests/verl/trainer/test_train_step.py",),
    ),
    Mistake(
        "other_temperature",
        "The log-probs of an update are those of another temperature than the rollouts'.",
        (
            Edit(
                _WORKER,
                "            temperature=self.temperature,\n",
                "            temperature=0.7 * self.temperature,\n",
            ),
        ),
        ("tests/verl/workers",),
    ),
    Mistake(
        "rewards_of_the_previous_step",
        "The rollouts of a step get the rewards of the step before.",
        (
            Edit(
                "verl/trainer/ppo.py",
                "        batch = to_batch(collected.kept, ",
                "        before = self.__dict__.get('before', collected.kept)\n"
                "        self.__dict__['before'] = collected.kept\n"
                "        kept = []\n"
                "        for number, group in enumerate(collected.kept):\n"
                "            old = before[number % len(before)].rewards\n"
                "            kept.append(replace(group, rewards=tuple(np.resize(old, len(group.rewards)))))\n"
                "        batch = to_batch(kept, ",
            ),
        ),
        ("tests/verl/trainer/test_train_step.py",),
    ),
    Mistake(
        "repeated_prompts",
        "Every step draws the prompts of the first one again.",
        (
            Edit(
                _ROLLOUTS,
                "tasks = [self.tasks.at(draw.drawn) for draw in draws]",
                "first = self.config.data.train_batch_size\n"
                "        tasks = [self.tasks.at([count % first for count in draw.drawn]) for draw in draws]",
            ),
        ),
        ("tests/verl/episodes",),
    ),
    Mistake(
        "no_warm_up",
        "The learning rate ignores its warm-up.",
        (
            Edit(
                "verl/workers/optim.py",
                "        return (step + 1) / settings.warmup_steps\n",
                "        return 1.0\n",
            ),
        ),
        ("tests/verl/workers/test_fsdp_engine.py",),
    ),
    Mistake(
        "dropped_special_tokens",
        "Special tokens that the policy writes are dropped from the text that is scored.",
        (
            Edit(
                "verl/chat/template.py",
                "text = self.response_text((*before, *token_ids))[len(self.response_text(before)) :]",
                "text = self.decoded((*before, *token_ids))[len(self.decoded(before)) :]",
            ),
        ),
        ("tests/verl/chat",),
    ),
    Mistake(
        "late_schedule",
        "A reward that follows a schedule is one step behind.",
        (
            Edit(_ROLLOUTS, "        update = version + 1\n", "        update = version\n"),
            Edit(
                _ROLLOUTS,
                "group = await self.rollout.rescored(group, step + 1)",
                "group = await self.rollout.rescored(group, step)",
            ),
            Edit(
                _ROLLOUTS,
                "greedy = greedy and await self.rollout.rescored(greedy, step + 1)",
                "greedy = greedy and await self.rollout.rescored(greedy, step)",
            ),
        ),
        ("tests/verl/episodes", "tests/verl/trainer/test_steps.py"),
    ),
)
