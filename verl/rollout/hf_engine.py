"""A rollout engine on transformers: slow, exact and reproducible; for tests and for machines without vLLM.

Unseeded requests that wait at the same time are decoded as one left-padded batch. A seeded request is decoded alone, so
that it is bit-for-bit reproducible: the rounding of log-probs depends on the other rows of a batch.
Shape legend: B requests, L tokens, V vocabulary.
"""

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from verl.errors import ConfigError, EngineError
from verl.lora import Lora, adapter_tensors, add_adapter
from verl.pretrained import language_weights, read_causal_lm
from verl.rollout.engine import Sampling, SingleEngine, each_of
from verl.rollout.stopping import reach
from verl.transfer.bucket import BucketHandle, BucketLayout, Receiver, all_names
from verl.types import Completion, FinishReason

MAX_BATCH = 256  # default number of completions per batch


class _Request(NamedTuple):
    prompt_ids: Sequence[int]
    sampling: Sampling
    future: asyncio.Future[tuple[Completion, ...]]


class HFEngine(SingleEngine):
    """Generates with a transformers model that it owns. tokenizer: needed only for stop strings"""

    def __init__(self, model: PreTrainedModel, max_batch: int = MAX_BATCH, tokenizer: Any = None) -> None:
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._max_batch = max_batch
        self._version: int | None = 0  # None: a weight sync failed halfway
        self._waiting: list[_Request] = []
        self._flush: asyncio.Task[None] | None = None
        self._receiver = Receiver(model.device)
        self._in_use = asyncio.Lock()  # held on the weights by a running batch or a weight sync
        self._interrupted = False
        self._written: Sequence[Sequence[int]] = ()  # tokens of the running batch

    async def tokens_written(self) -> int:
        """Those in progress."""
        return sum(map(len, self._written))

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        """Returns `sampling.n` completions; requests that wait at the same time share the batch."""
        if sampling.stop_strings and self._tokenizer is None:
            raise ConfigError("stop strings need a tokenizer; pass one to the engine")
        request = _Request(prompt_ids, sampling, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if self._flush is None or self._flush.done():
            self._flush = asyncio.create_task(self._run_waiting())
        return await request.future

    async def sleep(self) -> None:
        """No-op: the memory is kept."""

    async def close(self) -> None:
        """No-op: the engine started no processes."""

    async def _run_waiting(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)  # let other callers submit their requests first
            async with self._in_use:
                self._waiting = [each for each in self._waiting if not each.future.done()]  # drop cancelled requests
                if self._waiting:
                    await self._answer(self._next_batch())

    async def _answer(self, batch: Sequence[_Request]) -> None:
        rows = [(request.prompt_ids, one) for request in batch for one in each_of(request.sampling)]
        self._interrupted = False
        try:
            completions = await self._decode([prompt for prompt, _ in rows], [sampling for _, sampling in rows])
        except Exception as error:  # noqa: BLE001  raised in the callers
            for request in batch:
                if not request.future.done():
                    request.future.set_exception(error)
        else:
            remaining = iter(completions)
            for request in batch:
                its_own = tuple(islice(remaining, request.sampling.n))
                if not request.future.done():  # the caller may have been canceled
                    request.future.set_result(its_own)

    def _next_batch(self) -> list[_Request]:
        """The first request alone if it is seeded, else with further unseeded ones up to `max_batch`."""
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
        """Abort the running batch at its next token."""
        self._interrupted = True

    async def begin_weights(self, layouts: Sequence[BucketLayout]) -> None:
        """Check the names, wait for the running batch, and hold back further requests."""
        sent, own = set(all_names(layouts)), set(dict(self._named_parameters()))
        for names, problem in ((own - sent, "lacks"), (sent - own, "has unknown")):
            if names:
                raise EngineError(f"the weight sync {problem} {len(names)} weights, e.g. {min(names)!r}")
        await self._in_use.acquire()
        self._receiver.begin(layouts)

    async def load_bucket(self, layout: BucketLayout, *handles: BucketHandle) -> None:
        own = dict(self._named_parameters())
        with self._all_or_nothing():
            for name, view in layout.named(self._receiver.receive(layout, handles)):
                own[name].data.copy_(view)

    async def end_weights(self, version: int) -> None:
        with self._all_or_nothing():
            self._receiver.end()
        self._version = version
        self._in_use.release()

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """A failure in the middle of a weight sync leaves inconsistent weights; waiting requests then raise."""
        try:
            yield
        except BaseException:
            self._version = None
            self._in_use.release()
            raise

    def _named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """What a weight sync replaces: an adapter alone, if the model has one."""
        adapter = list(adapter_tensors(self._model))
        yield from adapter or language_weights(self._model, self._model.named_parameters(remove_duplicate=False))

    async def _decode(self, prompts: list[Sequence[int]], samplings: list[Sampling]) -> list[Completion]:
        if self._version is None:
            raise EngineError("a weight sync failed halfway, so the engine's weights are inconsistent; restart it")
        distinct = list(dict.fromkeys(map(tuple, prompts)))  # a group's common prompt is computed once
        longest = max(map(len, distinct))
        pads_B = torch.tensor([longest - len(prompt) for prompt in distinct])
        device = self._model.device
        ids_BL = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in distinct])
        mask_BL = (torch.arange(longest)[None] >= pads_B[:, None]).long()
        generators = [  # a seeded completion has its own, others torch's default one
            torch.default_generator if sampling.seed is None else torch.Generator().manual_seed(sampling.seed)
            for sampling in samplings
        ]
        self._written = tokens = [list[int]() for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        reasons: list[FinishReason | None] = [None] * len(prompts)
        cache, step_BL = DynamicCache(config=self._model.config), ids_BL
        rows = list(range(len(prompts)))  # of the forward pass, in its order
        while rows and not self._interrupted:
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
            if len(logits_BV) < len(rows):  # the prompts
                index = {prompt: place for place, prompt in enumerate(distinct)}
                owners = torch.LongTensor([index[tuple(prompt)] for prompt in prompts])
                cache.reorder_cache(owners)
                logits_BV, mask_BL = logits_BV[owners], mask_BL[owners]
            next_B = torch.zeros(len(rows), dtype=torch.long)
            for place, row in enumerate(rows):
                if reasons[row] is None:
                    seen = [*prompts[row], *tokens[row]]
                    token, logprob = _draw(logits_BV[place], samplings[row], seen, generators[row])
                    next_B[place] = token
                    tokens[row].append(token)
                    logprobs[row].append(logprob)
                    reasons[row] = self._finished(tokens[row], samplings[row])
            step_BL = next_B[:, None]
            mask_BL = torch.cat([mask_BL, torch.ones_like(step_BL)], dim=1)
            places = torch.LongTensor([place for place, row in enumerate(rows) if reasons[row] is None])
            if len(places) <= len(rows) * 7 // 8:  # a selection copies the cache, as every step does that appends to it
                cache.reorder_cache(places)
                step_BL, mask_BL, rows = step_BL[places], mask_BL[places], [rows[place] for place in places.tolist()]
            await asyncio.sleep(0)  # gives `interrupt` a chance to run
        self._written = ()
        return [
            Completion(array("i", ids), array("f", values), reason or FinishReason.ABORT, self._version)
            for ids, values, reason in zip(tokens, logprobs, reasons, strict=True)
        ]

    def _finished(self, tokens: list[int], sampling: Sampling) -> FinishReason | None:
        """Stop-string tokens are kept, including any text of the last one after the stop string."""
        ended = any(stop in self._tokenizer.decode(tokens[-reach(stop) :]) for stop in sampling.stop_strings)
        if ended or tokens[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(tokens) >= sampling.max_tokens else None


def load_hf_engine(
    path: str, dtype: torch.dtype, device: str, max_batch: int, tokenizer: Any = None, lora: Lora | None = None
) -> HFEngine:
    """An engine that loads its own model. Raises ConfigError if the model at `path` is missing or incomplete."""
    model = read_causal_lm(path, dtype)
    if lora is not None:
        add_adapter(model, lora)
    return HFEngine(model.to(torch.device(device)), max_batch, tokenizer)  # type: ignore[arg-type]


def _processors(sampling: Sampling) -> list[LogitsProcessor]:
    """In vLLM's order. Penalty and temperature both scale logits, so their order does not matter."""
    made: list[LogitsProcessor] = []
    if sampling.repetition_penalty != 1.0:
        made.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature != 0.0 and sampling.top_k != -1:
        made.append(TopKLogitsWarper(sampling.top_k))
    if sampling.temperature != 0.0 and sampling.top_p < 1.0:
        made.append(TopPLogitsWarper(sampling.top_p))
    return made


def _draw(logits_V: Tensor, sampling: Sampling, seen: Sequence[int], generator: torch.Generator) -> tuple[int, float]:
    """Sample a token; returns it with its log-prob. Temperature 0: the argmax, with its log-prob at temperature 1.

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
