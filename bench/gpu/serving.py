"""A vLLM engine beside a trainer's model on the same GPU: memory, log-probs, weight sync, sleep, decoding."""

from __future__ import annotations

import asyncio
import math
import os
import random
import subprocess
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from statistics import mean

import psutil
import torch
from transformers import AutoModelForCausalLM

from bench.gpu.inputs import model_folder, shape
from bench.gpu.measurements import Figures, UnexpectedError
from bench.gpu.place import Place
from tests.support.weight_sync import sync
from verl.batch.packing import make_units, pack
from verl.batch.samples import batch_of, sample_from_completion
from verl.errors import EngineError
from verl.rollout.engine import Sampling
from verl.rollout.gpu_share import MANY_TOKENS
from verl.rollout.vllm_engine import VLLMEngine, VLLMSettings
from verl.transfer.bucket import BucketSender, plan
from verl.transfer.gpu import CudaIpc
from verl.transfer.shared_memory import SharedMemory
from verl.types import Completion
from verl.units import GIB, MIB
from verl.workers.model import PackedPolicy, hf_named_parameters, load_causal_lm

BUCKET_BYTES = 256 * MIB
NUM_SEQUENCES = (256, 512, 1024, 2048)
COMPARED, TOKENS = 4, 32  # responses whose log-probs are compared, and their length
GAP = {torch.bfloat16: 0.15, torch.float32: 1e-3}  # mean difference of log-probs, nats; at most
SHORTFALL = 0.25  # of a greedy token's log-prob below the trainer's best one, nats; at most
PERTURBED = 0.3  # change of every weight, relative to the largest of its tensor


class Serving:
    """The engine starts with the first measurement. Weights are the trainer's after the first sync."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._engine: VLLMEngine | None = None
        self._policy: PackedPolicy | None = None
        self._version = 0
        self._random = random.Random(0)
        self._sender: BucketSender = SharedMemory() if place.rehearse else CudaIpc()

    async def start(self) -> Figures:
        """Memory of the whole GPU, by its driver: the plan assumes what contexts and sleeping engines take."""
        before = used_gib()
        torch.zeros(1, device=self.place.device)
        with_context = used_gib()
        model_folder(self.place)
        torch.cuda.empty_cache()
        with_model = used_gib()
        started = time.perf_counter()
        await self._started()
        return {
            "start of the engine: s": time.perf_counter() - started,
            "compiled, with CUDA graphs": "no" if self.place.again or self.place.rehearse else "yes",
            "used before: GiB": before,
            "the trainer's CUDA context: GiB": with_context - before,
            "engine awake: GiB": used_gib() - with_model,
        }

    async def greedy(self) -> Figures:
        """Raises UnexpectedError if a greedy token is far from the trainer's best one, or log-probs differ."""
        engine, prompts = await self._started(), self._prompts()
        plain = AutoModelForCausalLM.from_pretrained(model_folder(self.place), dtype=self._dtype).to(self.place.device)
        same, shortfalls = [], []
        for prompt in prompts:
            (response,) = await engine.generate(prompt, Sampling(TOKENS, 0.0))
            with torch.no_grad():
                logits = plain(torch.tensor([[*prompt, *response.token_ids]], device=self.place.device)).logits[0]
            steps = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
            chosen = torch.tensor(response.token_ids, device=steps.device)
            best = steps.max(-1).values
            shortfalls.append(float((best - steps.gather(-1, chosen[:, None]).squeeze(-1)).max()))
            same.append(float((steps.argmax(-1) == chosen).float().mean()))
        figures: Figures = {
            "greedy tokens that are transformers' own": mean(same),
            "largest shortfall of a greedy token: nats": max(shortfalls),
            "mean difference of log-probs, sampled: nats": await self._gap(),
        }
        if max(shortfalls) > SHORTFALL:
            raise UnexpectedError(
                f"a greedy token is {max(shortfalls):.3g} nats below the best, bound {SHORTFALL}", figures
            )
        return self._checked(figures, float(figures["mean difference of log-probs, sampled: nats"]), "at the start")

    async def sync(self) -> Figures:
        """Unchanged weights, then others: the difference of log-probs must follow, and vanish with the next sync."""
        await self._started()
        figures: Figures = {}
        for number in ("first", "second"):
            figures[f"{number} sync: s"] = await self._sync()
        unchanged = await self._gap()
        self._perturb()
        apart = await self._gap()
        figures["sync of perturbed weights: s"] = await self._sync()
        after = await self._gap()
        figures |= {
            "log-probs after a sync of unchanged weights: nats": unchanged,
            "log-probs of perturbed weights before the sync: nats": apart,
            "and after it: nats": after,
        }
        if not apart > 2 * GAP[self._dtype]:
            raise UnexpectedError(f"the perturbed weights differ by {apart:.3g} nats only", figures)
        self._checked(figures, unchanged, "after a sync of unchanged weights")
        return self._checked(figures, after, "after the sync of perturbed weights")

    async def sleep(self) -> Figures:
        """Asleep it must refuse requests, and wake up with the weights of the next sync. On a CPU it does not sleep."""
        engine, _ = await self._started(), self._trainer()
        awake = used_gib()
        figures: Figures = {"sleep: s": await _timed(engine.sleep())}
        asleep = used_gib()
        refused = await _is_refused(engine)
        self._perturb()
        figures["sync that wakes it up: s"] = await self._sync()
        gap = await self._gap()
        figures |= {
            "used awake: GiB": awake,
            "used asleep: GiB": asleep,
            "used awake again: GiB": used_gib(),
            "trainer's own, allocated: GiB": 0.0 if self.place.rehearse else torch.cuda.memory_reserved() / GIB,
            "log-probs after wake-up: nats": gap,
        }
        if not refused and not self.place.rehearse:
            raise UnexpectedError("a sleeping engine answered a request", figures)
        return self._checked(figures, gap, "after wake-up")

    async def decode(self) -> Figures:
        """Distinct prompts with several responses each, all of full length. The first batch warms up."""
        engine = await self._started()
        prompt, response, responses = self.place.lengths
        counts = (4,) if self.place.rehearse else NUM_SEQUENCES
        await self._batch(engine, counts[0] // responses, prompt, response)
        figures = Figures()
        for count in counts:
            label = f"{count:,} sequences"
            cpu, started = _cpu_seconds(), time.perf_counter()
            await self._batch(engine, count // responses, prompt, response)
            took, used = time.perf_counter() - started, [b - a for a, b in zip(cpu, _cpu_seconds(), strict=True)]
            tokens = count * response
            figures[f"{label}: tokens/s, prefill included"] = tokens / took
            figures[f"{label}, CPU of this process: us a token"] = 1e6 * used[0] / tokens
            figures[f"{label}, CPU of vLLM's processes: us a token"] = 1e6 * used[1] / tokens
        return figures

    async def corrupted(self) -> Figures:
        """One bucket with another checksum: refused, and the engine is unusable from then on. Always the last."""
        engine = await self._started()
        named = list(hf_named_parameters(self._trainer()))
        layout, *_ = layouts = plan(named, self._dtype, BUCKET_BYTES)
        await engine.begin_weights(layouts)
        flat = self._sender.buffer(layout)
        for each, view in layout.unpack(flat):
            view.copy_(dict(named)[each.names[0]].detach())
        handle = replace(self._sender.send(layout, flat), digest="0" * 64)  # type: ignore[type-var]
        try:
            await engine.load_bucket(layout, handle)
        except EngineError as error:
            if "checksum mismatch" not in str(error):
                raise
        else:
            raise UnexpectedError("a corrupted bucket was loaded", {})
        if not await _is_refused(engine):
            raise UnexpectedError("the engine answered with half of its weights", {})
        return {"corrupted bucket": "refused"}

    async def close(self) -> None:
        """End vLLM's processes."""
        if self._engine is not None:
            await self._engine.close()

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float32 if self.place.rehearse else torch.bfloat16

    def _settings(self, model: str) -> VLLMSettings:
        """After a failure without compilation and CUDA graphs, which are what may fail or take too long."""
        prompt, response, _ = self.place.lengths
        longest, dtype = max(prompt + response, 2 * TOKENS), str(self._dtype).removeprefix("torch.")
        if self.place.rehearse:
            return VLLMSettings(model, longest, dtype, kv_cache_gib=0.25, sleeps=True)
        return VLLMSettings(
            model,
            longest,
            dtype,
            gpu_memory_utilization=0.6,
            sleeps=True,
            max_num_seqs=NUM_SEQUENCES[-1],
            max_num_batched_tokens=MANY_TOKENS,
            enforce_eager=self.place.again,
        )

    async def _started(self) -> VLLMEngine:
        if self._engine is None:
            self._engine = await VLLMEngine.start(self._settings(str(model_folder(self.place))))
        return self._engine

    def _trainer(self) -> PackedPolicy:
        if self._policy is None:
            model = load_causal_lm(str(model_folder(self.place)), self._dtype)
            self._policy = PackedPolicy(model.to(self.place.device)).requires_grad_(False)
        return self._policy

    def _prompts(self) -> list[list[int]]:
        return [self._prompt(TOKENS) for _ in range(COMPARED)]

    def _prompt(self, length: int) -> list[int]:
        return [self._random.randrange(shape(self.place).vocab_size) for _ in range(length)]

    async def _batch(self, engine: VLLMEngine, count: int, prompt: int, response: int) -> None:
        sampling = Sampling(response, n=self.place.lengths[2])
        await asyncio.gather(*(engine.generate(self._prompt(prompt), sampling) for _ in range(count)))

    async def _gap(self) -> float:
        """Mean difference between the engine's log-probs of sampled tokens and the trainer's."""
        engine, policy = await self._started(), self._trainer()
        prompts = self._prompts()
        responses = await asyncio.gather(*(engine.generate(each, Sampling(TOKENS)) for each in prompts))
        gaps = []
        for prompt, (response,) in zip(prompts, responses, strict=True):
            exact = self._logprobs(policy, prompt, response)
            gaps += [abs(ours - theirs) for ours, theirs in zip(response.logprobs, exact, strict=True)]
        return mean(gaps)

    def _logprobs(self, policy: PackedPolicy, prompt: Sequence[int], response: Completion) -> list[float]:
        batch = batch_of([sample_from_completion(prompt, response)])
        packed = pack(make_units(batch, False, 10_000), batch).to(torch.device(self.place.device))
        found: list[float] = policy(packed, 1.0, False).logprobs.tolist()
        return found

    def _perturb(self) -> None:
        """Other weights, by far more than rounding."""
        generator = torch.Generator(self.place.device).manual_seed(self._version)
        for weight in self._trainer().parameters():
            noise = torch.rand(weight.shape, generator=generator, device=weight.device) - 0.5
            weight.add_(2 * PERTURBED * weight.abs().max() * noise)

    async def _sync(self) -> float:
        """Seconds of a sync of all weights, each bucket with its checksum."""
        self._version += 1
        named = list(hf_named_parameters(self._trainer()))
        took = await _timed(sync(await self._started(), self._version, named, self._dtype, BUCKET_BYTES, self._sender))
        self._sender.release()
        return took

    def _checked(self, figures: Figures, gap: float, when: str) -> Figures:
        if not gap <= GAP[self._dtype]:
            raise UnexpectedError(f"log-probs differ by {gap:.3g} nats {when}, bound {GAP[self._dtype]}", figures)
        return figures


async def _is_refused(engine: VLLMEngine) -> bool:
    try:
        await engine.generate([1, 2, 3], Sampling(1))
    except EngineError:
        return True
    return False


async def _timed(work: Awaitable[object]) -> float:
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


def _cpu_seconds() -> tuple[float, float]:
    """CPU seconds of this process, and of its living descendants."""
    process = psutil.Process()
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    own, *others = (each.user + each.system for each in times)
    return own, sum(others)


def used_gib() -> float:
    """Memory in use on the GPU, by all processes, NaN where nvidia-smi has no figure; without one, in this machine."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", _index()]
    if not torch.cuda.is_available():
        return psutil.virtual_memory().used / GIB
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    try:
        return float(found.stdout) * MIB / GIB
    except ValueError:  # "[N/A]" in some virtual machines
        return math.nan


def _index() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
