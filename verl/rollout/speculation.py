"""Speculative decoding with vLLM: drafts from the context, checked by the model, so the distribution stays the same.

`ngram` is vLLM's prompt lookup. The last tokens are looked up in prompt and response, and what followed them there is
the draft of the next tokens: tool calls copy names and values. A forward pass checks all tokens of a draft at once.
Rejection sampling keeps the model's distribution (Leviathan et al., 2023, arXiv:2211.17192).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from verl.rollout.stopping import Decode, tokens_to_stop
from verl.types import Completion

MAX_DRAFT = 4  # tokens
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": MAX_DRAFT,
    "prompt_lookup_min": 2,  # tokens that must match
    "prompt_lookup_max": 4,  # the longest match is preferred
}


def until_stop(completion: Completion, stops: Sequence[str], decode: Decode) -> Completion:
    """Without tokens after a stop string: vLLM 0.24 keeps those that the same forward pass has accepted."""
    if not stops:
        return completion
    start = max(0, len(completion.token_ids) - MAX_DRAFT - 1)
    end = tokens_to_stop(decode, completion.token_ids[:start], completion.token_ids[start:], stops)
    if end is None:  # it ended otherwise
        return completion
    kept = start + end
    return replace(completion, token_ids=completion.token_ids[:kept], logprobs=completion.logprobs[:kept])


class DraftCounter:
    """Counts the tokens of drafts. Implements vLLM's `StatLoggerBase`, whose import takes ten seconds."""

    def __init__(self) -> None:
        self._drafted = self._accepted = 0

    def __call__(self, vllm_config: Any, engine_index: int = 0) -> DraftCounter:
        """vLLM asks a factory for its loggers; one engine needs one."""
        return self

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        drafts = None if scheduler_stats is None else scheduler_stats.spec_decoding_stats
        if drafts is not None:
            self._drafted += drafts.num_draft_tokens
            self._accepted += drafts.num_accepted_tokens

    def log_engine_initialized(self) -> None:
        """No-op, as the next two."""

    def log(self) -> None: ...

    def record_sleep_state(self, is_awake: int, level: int) -> None: ...

    def take(self) -> dict[str, float]:
        """Metrics since the last call."""
        drafted, accepted, self._drafted, self._accepted = self._drafted, self._accepted, 0, 0
        return {"rollout/draft_tokens": float(drafted), "rollout/accepted_tokens": float(accepted)}
