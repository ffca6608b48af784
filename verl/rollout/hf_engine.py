"""A rollout engine on transformers: slow, exact and repeatable; for tests and for machines without vLLM.

Requests that wait at the same moment are decoded as one left-padded batch. Each draws from a generator of its own, so a
seeded request gives the same tokens whatever else is in its batch. Shape legend: B requests, L tokens, V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from verl.rollout.engine import Sampling
from verl.types import Completion, FinishReason

_Request = tuple[Sequence[int], Sampling, "asyncio.Future[Completion]"]


class HFEngine:
    """Generates with a transformers model that it owns."""

    def __init__(self, model: PreTrainedModel, max_batch: int = 64) -> None:
        self._model = model.eval()
        self._max_batch = max_batch
        self._version = 0
        self._waiting: list[_Request] = []
        self._flush: asyncio.Task[None] | None = None

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """One completion; what else waits at this moment is decoded with it."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((prompt_ids, sampling, future))
        if self._flush is None or self._flush.done():
            self._flush = asyncio.create_task(self._run_waiting())
        return await future

    async def _run_waiting(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)  # let all that are about to ask do so
            batch, self._waiting = self._waiting[: self._max_batch], self._waiting[self._max_batch :]
            try:
                completions = self._decode([prompt for prompt, _, _ in batch], [sampling for _, sampling, _ in batch])
            except Exception as error:  # noqa: BLE001  whoever asked must hear of it
                for _, _, future in batch:
                    future.set_exception(error)
            else:
                for (_, _, future), completion in zip(batch, completions, strict=True):
                    future.set_result(completion)

    @torch.no_grad()
    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors in by name. Raises KeyError for a name the model does not have."""
        own = dict(self._model.named_parameters(remove_duplicate=False))
        for name, tensor in weights:
            own[name].copy_(tensor)
        self._version = version

    @torch.no_grad()
    def _decode(self, prompts: list[Sequence[int]], samplings: list[Sampling]) -> list[Completion]:
        longest = max(len(prompt) for prompt in prompts)
        pads_B = torch.tensor([longest - len(prompt) for prompt in prompts])
        ids_BL = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask_BL = (torch.arange(longest)[None] >= pads_B[:, None]).long()
        generators = [_generator(sampling.seed) for sampling in samplings]
        tokens: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        reasons: list[FinishReason | None] = [None] * len(prompts)
        cache, step_BL = DynamicCache(), ids_BL
        while any(reason is None for reason in reasons):
            positions_BL = (mask_BL.cumsum(-1) - 1).clamp(min=0)[:, -step_BL.shape[1] :]
            output = self._model(
                input_ids=step_BL,
                attention_mask=mask_BL,
                position_ids=positions_BL,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            next_B = torch.zeros(len(prompts), dtype=torch.long)
            for row, sampling in enumerate(samplings):
                if reasons[row] is None:
                    token, logprob = _draw(output.logits[row, -1], sampling.temperature, generators[row])
                    next_B[row] = token
                    tokens[row].append(token)
                    logprobs[row].append(logprob)
                    reasons[row] = _finished(tokens[row], sampling)
            step_BL = next_B[:, None]
            mask_BL = torch.cat([mask_BL, torch.ones_like(step_BL)], dim=1)
        return [
            Completion(tuple(ids), tuple(said), reason or FinishReason.LENGTH, self._version)
            for ids, said, reason in zip(tokens, logprobs, reasons, strict=True)
        ]


def _generator(seed: int | None) -> torch.Generator:
    generator = torch.Generator()
    generator.manual_seed(torch.initial_seed() if seed is None else seed)
    return generator


def _draw(logits_V: Tensor, temperature: float, generator: torch.Generator) -> tuple[int, float]:
    """A token and its log-prob; at temperature 0 the likeliest one, with its log-prob at temperature 1."""
    logprobs_V = (logits_V.float() / (temperature or 1.0)).log_softmax(-1)
    if temperature == 0.0:
        token = int(logprobs_V.argmax())
    else:
        token = int(torch.multinomial(logprobs_V.exp(), 1, generator=generator))
    return token, float(logprobs_V[token])


def _finished(tokens: list[int], sampling: Sampling) -> FinishReason | None:
    if tokens[-1] in sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(tokens) >= sampling.max_tokens else None
