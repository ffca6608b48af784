"""Builds an SFT run from its configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from verl.build.base import rounded_base
from verl.build.env import build_episode_runner, with_tool_call_format
from verl.build.ranks import (
    DTYPES,
    abs_paths,
    check_device,
    check_four_bits,
    choose_device,
    fused_kernels,
    optimizer_settings,
    warn_of_slow_dtype,
)
from verl.build.run import closing_run, load_chat_template
from verl.build.threads import num_threads
from verl.chat.observations import ObservationTokenizer
from verl.chat.template import ChatTemplate
from verl.checkpoint.checkpoint import CheckpointStore
from verl.checkpoint.contents import contents_of
from verl.checkpoint.crash import crash_reported
from verl.checkpoint.state import find_saved, resume_config
from verl.config.commands import SFT
from verl.config.schema import Config
from verl.data.overlap import TrainTasks
from verl.data.report import RowReport
from verl.episodes.start_check import check_turns
from verl.errors import ConfigError
from verl.formats.plain import PLAIN
from verl.lora import check_targets, lora_of
from verl.sft.demonstrations import Demonstration, read_demonstrations, sft_samples
from verl.sft.objectives import DPO, Likelihood
from verl.sft.pairs import pair_samples, read_preferences
from verl.sft.run import COMMAND, SFTRun, SFTSettings
from verl.single_controller.group import WorkerView
from verl.single_controller.ray import Bundle, Cluster
from verl.tracking.console import Display
from verl.tracking.timers import PhaseTimer
from verl.tracking.tracker import RunInfo, build_trackers
from verl.trainer.policy import PackSettings, Policy
from verl.types import Task
from verl.workers.memory import PackShape
from verl.workers.parity import check_packs
from verl.workers.rank import RankSpec, build_rank


@contextmanager
def start_sft_run(config: Config, folder: Path, display: Display) -> Iterator[SFTRun[Any]]:
    """Start all components of an SFT run; they are shut down at the end of the block."""
    console = display.console
    display.phase("data")
    check_device(config.trainer)
    warn_of_slow_dtype(config)
    chat, trainer = load_chat_template(config.model), config.trainer
    config = with_tool_call_format(config, chat)
    tool_call_format = config.env.tool_call_format
    runner = None if tool_call_format in (None, "native") else build_episode_runner(config, chat)
    observations = None if runner is None else runner.observations
    check_turns(observations or ObservationTokenizer(chat, PLAIN, 0))
    of_pairs = config.sft.loss == "dpo"
    train, demonstrations = _load(config, config.data.train_files, chat, observations, console)
    val, _ = _load(config, config.data.val_files, chat, observations, console)
    train_tasks = TrainTasks.of(tasks_of(demonstrations), TrainTasks.read(config.model.path))
    store = CheckpointStore(folder / "checkpoints", trainer.keep_last, trainer.keep_best)
    resumable = resume_config(config, SFT)
    contents = contents_of(resumable, reads_weights=of_pairs or config.lora.enabled)
    saved = find_saved(store, COMMAND, resumable, contents, trainer.allow_changed)
    batch_size = config.data.train_batch_size
    if batch_size > len(train):
        examples = f"{len(train)} {'pairs' if of_pairs else 'responses'}"
        raise ConfigError(f"data.train_batch_size={batch_size} exceeds the {examples} of the training data")
    total_steps = trainer.total_training_steps or trainer.total_epochs * (len(train) // batch_size)
    assert config.model.path is not None
    check_packs(config.model.path, _longest(config))
    if (lora := lora_of(config.lora)) is not None:
        check_targets(lora, config.model.path)
        check_four_bits(lora)
    loaded = abs_paths(rounded_base(config, folder)).model
    assert loaded.path is not None
    spec = RankSpec(
        model_path=loaded.path,
        tokenizer_path=loaded.tokenizer_path,
        compute_dtype=DTYPES[config.model.compute_dtype],
        temperature=1.0,
        lora=lora,
        optimizer=optimizer_settings(config.actor, config.actor.optim, total_steps),
        gradient_checkpointing=config.model.enable_gradient_checkpointing,
        largest_pack=PackShape(config.actor.max_tokens_per_pack, config.actor.max_tokens_per_pack),
        ranks_per_node=trainer.n_gpus_per_node,
        num_threads=num_threads(trainer.num_threads, trainer.n_gpus_per_node),
        seed=trainer.seed,
        timeout_s=trainer.stall_timeout_s,
    )
    num_ranks = trainer.nnodes * trainer.n_gpus_per_node
    display.total_steps = total_steps
    run = RunInfo(folder, trainer.experiment_name, trainer.project_name, asdict(config))
    trackers = build_trackers(trainer.logger, run, display)
    join = trainer.nnodes > 1
    display.phase("Ray")
    with (
        Cluster.start(num_ranks, None, trainer.stall_timeout_s, join, trainer.health_timeout_s) as cluster,
        crash_reported(folder),
    ):
        device = choose_device(trainer, cluster.num_gpus)
        spec = replace(spec, device=device, fused_kernels=fused_kernels(config.model, device))
        bundle = Bundle(1.0, 1.0 if device == "cuda" else 0.0)
        display.phase("ranks")
        workers = cluster.group("trainer", partial(build_rank, spec), cluster.pool([bundle] * num_ranks), bundle)
        policy = Policy(WorkerView(workers, "policy"), PackSettings(config.actor.max_tokens_per_pack))
        settings = SFTSettings(
            total_steps=total_steps,
            batch_size=batch_size,
            test_freq=trainer.test_freq,
            save_freq=trainer.save_freq,
            seed=trainer.seed,
        )
        timer = PhaseTimer(display.phase)
        with closing_run(folder, trackers, workers):
            sft_run = SFTRun(
                settings=settings,
                train=train,
                val=val,
                objective=DPO(config.sft.beta) if of_pairs else Likelihood(),
                policy=policy,
                workers=workers,
                store=store,
                trackers=trackers,
                timer=timer,
                resume_config=resumable,
                contents=contents,
                saved=saved,
                train_tasks=train_tasks,
                # without a format, schemas are rendered by the chat template
                tool_call_format=tool_call_format or ("native" if any(each.tools for each in demonstrations) else None),
            )
            display.started()
            with crash_reported(folder, sft_run.where), sft_run.listening(trainer.save_on_signal, console):
                yield sft_run


def _load(
    config: Config, files: list[str], chat: ChatTemplate, observations: ObservationTokenizer | None, console: Console
) -> tuple[list[Any], list[Demonstration]]:
    """(samples, or pairs, of all files, with consecutive group numbers; the demonstrations, or chosen responses)."""
    examples: list[Any] = []
    demonstrations: list[Demonstration] = []
    max_bad_share = config.data.max_bad_share
    for source in files:
        report = RowReport(source)
        how = (chat, _longest(config), max_bad_share, report, len(demonstrations), observations)
        if config.sft.loss == "dpo":
            preferences = read_preferences(source, max_bad_share, report, config.data)
            examples += pair_samples(preferences, *how)
            demonstrations += [each.chosen for each in preferences]
        else:
            found = read_demonstrations(source, max_bad_share, report, config.data)
            examples += sft_samples(found, *how)
            demonstrations += found
        console.print(str(report), markup=False, soft_wrap=True)
    return examples, demonstrations


def _longest(config: Config) -> int:
    """Tokens of the longest sample. Turns of a conversation count as the prompt of the next one, so only the sum of
    both limits can hold."""
    return config.data.max_prompt_length + config.data.max_response_length


def tasks_of(demonstrations: Iterable[Demonstration]) -> Iterator[Task]:
    """Every trained response as a task: the messages before it are the prompt."""
    for each in demonstrations:
        for place in each.trained:
            yield Task(each.id, each.messages[:place], each.messages[place].content, "demonstrations")
