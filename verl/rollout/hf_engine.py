"""A rollout engine on transformers: slow, exact and repeatable; for tests and for machines without vLLM.

Requests without a seed that wait at the same moment are decoded as one left-padded batch. A seeded request is decoded
by itself, because the rounding of its log-probs depends on what shares its batch: it repeats bit for bit.
Shape legend: B requests, L tokens, V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessor,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from verl.errors import ConfigError, EngineError
from verl.rollout.engine import Sampling, each_of
from verl.rollout.stopping import reach
from verl.transfer.bucket import BucketHandle, BucketLayout, Receiver, all_names
from verl.types import Completion, FinishReason
from verl.utils.pretrained import read_causal_lm

MAX_BATCH = 256  # completions decoded together, where nothing else is asked for


class _Request(NamedTuple):
    """One call of `generate`."""

    prompt_ids: Sequence[int]
    sampling: Sampling
    future: asyncio.Future[tuple[Completion, ...]]


class HFEngine:
    """Generates with a transformers model that it owns.

    tokenizer: needed for stop strings alone
    """

    def __init__(self, model: PreTrainedModel, max_batch: int = MAX_BATCH, tokenizer: Any = None) -> None:
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._max_batch = max_batch
        self._version: int | None = 0  # None: new weights are there in part
        self._waiting: list[_Request] = []
        self._flush: asyncio.Task[None] | None = None
        self._receiver = Receiver(model.device)
        self._in_use = asyncio.Lock()  # the weights, by a batch or by those who replace them
        self._interrupted = False

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        """`sampling.n` completions; what else waits at this moment is decoded with them."""
        if sampling.stop_strings and self._tokenizer is None:
            raise ConfigError("stop strings need the engine's tokenizer; give it one")
        request = _Request(prompt_ids, sampling, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if self._flush is None or self._flush.done():
            self._flush = asyncio.create_task(self._run_waiting())
        return await request.future

    async def sleep(self) -> None:
        """Nothing to give up."""

    async def close(self) -> None:
        """Nothing to end."""

    async def _run_waiting(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)  # let all that are about to ask do so
            async with self._in_use:
                self._waiting = [each for each in self._waiting if not each.future.done()]  # those were cancelled
                if self._waiting:
                    await self._answer(self._next_batch())

    async def _answer(self, batch: Sequence[_Request]) -> None:
        rows = [(request.prompt_ids, one) for request in batch for one in each_of(request.sampling)]
        self._interrupted = False
        try:
            completions = await self._decode([prompt for prompt, _ in rows], [sampling for _, sampling in rows])
        except Exception as error:  # noqa: BLE001  whoever asked must hear of it
            for request in batch:
                if not request.future.done():
                    request.future.set_exception(error)
        else:
            remaining = iter(completions)
            for request in batch:
                its_own = tuple(islice(remaining, request.sampling.n))
                if not request.future.done():  # whoever asked may have been cancelled
                    request.future.set_result(its_own)

    def _next_batch(self) -> list[_Request]:
        """The first request alone if it is seeded, else with others that are not, while there is room."""
        batch = [self._waiting.pop(0)]
        count = batch[0].sampling.n
        while batch[0].sampling.seed is None and self._waiting:
            following = self._waiting[0].sampling
            if following.seed is not None or count + following.n > self._max_batch:
                break
            batch.append(self._waiting.pop(0))
            count += following.n
        return batch

    async def interrupt(self) -> None:
        """Break off the batch that is being decoded, at its next token."""
        self._interrupted = True

    async def begin_weights(self, layouts: Sequence[BucketLayout]) -> None:
        """Check the names, and let requests wait, once the batch is done that is being decoded."""
        sent, own = set(all_names(layouts)), set(dict(self._named_parameters()))
        for names, said in ((own - sent, "lacks"), (sent - own, "has unknown")):
            if names:
                raise EngineError(f"a publication {said} {len(names)} weights, among them {min(names)!r}")
        await self._in_use.acquire()

    async def load_bucket(self, layout: BucketLayout, *offers: BucketHandle) -> None:
        """Copy the weights in by name."""
        own = dict(self._named_parameters())
        try:
            for name, view in layout.named(self._receiver.receive(layout, offers)):
                own[name].data.copy_(view)
        except BaseException:
            self._version = None
            self._in_use.release()  # whoever waits must hear of it
            raise

    async def end_weights(self, version: int) -> None:
        """Requests go on."""
        self._version = version
        self._in_use.release()

    def _named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield from self._model.named_parameters(remove_duplicate=False)

    async def _decode(self, prompts: list[Sequence[int]], samplings: list[Sampling]) -> list[Completion]:
        if self._version is None:
            raise EngineError("new weights were put into the engine in part; start it anew")
        longest = max(len(prompt) for prompt in prompts)
        pads_B = torch.tensor([longest - len(prompt) for prompt in prompts])
        device = self._model.device
        ids_BL = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask_BL = (torch.arange(longest)[None] >= pads_B[:, None]).long()
        generators = [_generator(sampling.seed) for sampling in samplings]
        tokens: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        reasons: list[FinishReason | None] = [None] * len(prompts)
        cache, step_BL = DynamicCache(), ids_BL
        while any(reason is None for reason in reasons) and not self._interrupted:
            positions_BL = (mask_BL.cumsum(-1) - 1).clamp(min=0)[:, -step_BL.shape[1] :]
            with torch.no_grad():
                output = self._model(
                    input_ids=step_BL.to(device),
                    attention_mask=mask_BL.to(device),
                    position_ids=positions_BL.to(device),
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
            logits_BV = output.logits[:, -1].cpu()
            next_B = torch.zeros(len(prompts), dtype=torch.long)
            for row, sampling in enumerate(samplings):
                if reasons[row] is None:
                    seen = [*prompts[row], *tokens[row]]
                    token, logprob = _draw(logits_BV[row], sampling, seen, generators[row])
                    next_B[row] = token
                    tokens[row].append(token)
                    logprobs[row].append(logprob)
                    reasons[row] = self._finished(tokens[row], sampling)
            step_BL = next_B[:, None]
            mask_BL = torch.cat([mask_BL, torch.ones_like(step_BL)], dim=1)
            await asyncio.sleep(0)  # or nobody could interrupt
        return [
            Completion(tuple(ids), tuple(said), reason or FinishReason.ABORT, self._version)
            for ids, said, reason in zip(tokens, logprobs, reasons, strict=True)
        ]

    def _finished(self, tokens: list[int], sampling: Sampling) -> FinishReason | None:
        """A stop string's tokens are kept, and what its last token holds behind it."""
        if tokens[-1] in sampling.stop_token_ids or any(self._ends(tokens, stop) for stop in sampling.stop_strings):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(tokens) >= sampling.max_tokens else None

    def _ends(self, tokens: list[int], stop: str) -> bool:
        """Whether the text of the last tokens holds `stop`."""
        return stop in self._tokenizer.decode(tokens[-reach(stop) :])


def load_hf_engine(path: str, dtype: torch.dtype, device: str, max_batch: int, tokenizer: Any = None) -> HFEngine:
    """An engine with a model of its own. Raises ConfigError if there is no model at `path`, or not a whole one."""
    model = read_causal_lm(path, dtype)
    return HFEngine(model.to(torch.device(device)), max_batch, tokenizer)  # type: ignore[arg-type]


def _processors(sampling: Sampling) -> list[LogitsProcessor]:
    """In vLLM's order. A penalty scales logits, so that it may come after the temperature, which does, too."""
    made: list[LogitsProcessor] = []
    if sampling.repetition_penalty != 1.0:
        made.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature == 0.0:
        return made
    if sampling.min_p > 0.0:
        made.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k != -1:
        made.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        made.append(TopPLogitsWarper(sampling.top_p))
    return made


def _generator(seed: int | None) -> torch.Generator:
    """Of its own for a seeded completion, torch's for all others."""
    return torch.default_generator if seed is None else torch.Generator().manual_seed(seed)


def _draw(logits_V: Tensor, sampling: Sampling, seen: Sequence[int], generator: torch.Generator) -> tuple[int, float]:
    """A token and its log-prob; at temperature 0 the likeliest one, with its log-prob at temperature 1.

    seen: tokens of the prompt and of the response so far
    """
    logits_1V = (logits_V.float() / (sampling.temperature or 1.0))[None]
    for processor in _processors(sampling):
        logits_1V = processor(torch.tensor([list(seen)]), logits_1V)
    logprobs_V = logits_1V[0].log_softmax(-1)
    if sampling.temperature == 0.0:
        token = int(logprobs_V.argmax())
    else:
        token = int(torch.multinomial(logprobs_V.exp(), 1, generator=generator))
    return token, float(logprobs_V[token])
