"""Builds a run from its configuration. Only the build_* modules name concrete classes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path

import torch

from verl.algorithms.algorithm import Algorithm
from verl.build.algorithm import (
    algorithm_of,
    build_entropy_control,
    build_kl_control,
    check_algorithm,
    check_rewards,
    needs_reference,
)
from verl.build.base import rounded_base
from verl.build.demonstration import demonstrations
from verl.build.engines import build_sampling, engine_dtype
from verl.build.env import build_episode_runner, prompt_fn, prompt_record, services_of_rows, truncating
from verl.build.ranks import DTYPES, check_adapter, choose_device
from verl.build.scorer import build_scorer
from verl.build.teacher import check_teacher, connect_teacher
from verl.build.transport import connect
from verl.build.workers import Workers, start_workers
from verl.chat.history import check_history
from verl.chat.template import ChatTemplate
from verl.checkpoint.checkpoint import STATE, CheckpointStore, read_state
from verl.checkpoint.contents import contents_of
from verl.checkpoint.crash import crash_reported
from verl.checkpoint.deadline import start_shutdown_timer
from verl.checkpoint.state import Saved, find_saved, resume_config
from verl.config.commands import TRAIN
from verl.config.schema import BEST_OF_GROUP, Config, ModelConfig, TrainerConfig
from verl.data.lengths import PromptIds, read_tasks, split_rows
from verl.data.overlap import TrainTasks, check_overlap
from verl.data.report import RowReport
from verl.data.row_names import RowNames
from verl.data.source import source_name
from verl.data.tasks import TaskCursor, TaskStream
from verl.episodes.episode import EpisodeRunner
from verl.episodes.group import GroupRollout
from verl.episodes.manager import RolloutManager
from verl.episodes.start_check import check_golds
from verl.errors import ConfigError, DataError
from verl.host.daemon import run_async
from verl.host.services import check_services
from verl.pretrained import end_tokens, read_tokenizer
from verl.rollout.engine import RolloutEngine, Sampling
from verl.rollout.pool import EnginePool, OnWeightSync
from verl.scoring.pool import Scorer
from verl.scoring.rewards import Rewards, build_rewards
from verl.single_controller.group import WorkerGroup, WorkerView
from verl.single_controller.ray import Cluster
from verl.tracking.console import Display
from verl.tracking.flops import FROZEN, TRAINING, DecoderShape, peak_flops
from verl.tracking.timers import PhaseTimer
from verl.tracking.tracker import RunInfo, Trackers, build_trackers
from verl.tracking.transcripts import Transcripts
from verl.trainer import hooks
from verl.trainer.callbacks import build_callbacks
from verl.trainer.checkpointing import Checkpointing
from verl.trainer.collapse_policy import CollapsePolicy
from verl.trainer.learner import Learner
from verl.trainer.loop import COMMAND, TrainingRun
from verl.trainer.metrics import Meter
from verl.trainer.policy import Critic, PackSettings, Policy
from verl.trainer.ppo import PPOTrainer
from verl.trainer.self_teacher import SelfTeacher
from verl.trainer.teacher_server import TeacherServer
from verl.trainer.validate import Validator
from verl.trainer.weight_sync import WeightSync
from verl.transfer.bucket import BucketLayout
from verl.types import Task
from verl.utils.reward_score.rlla import TOGGLES
from verl.workers.rank import ModelInfo, TrainingRank

_log = logging.getLogger(__name__)
_NUM_PROBES = 2
_PROBE_PROMPT_TOKENS = 64  # per prompt; stale weights show on any text
_PROBE_TOKENS = 8
# Tolerance on mean abs(logp_engine - logp_trainer) in nats. bf16 on either side gives 0.03 to 0.05, float32 1e-5.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}


def run_folder(config: TrainerConfig) -> Path:
    """The output folder of a run. Raises ConfigError if it holds a run that must not be resumed."""
    folder = (Path(config.default_local_dir) / config.experiment_name).resolve()  # workers have another cwd
    if config.resume_mode == "disable" and (folder / "checkpoints").exists():
        raise ConfigError(
            f"{folder} already holds a run, and trainer.resume_mode=disable forbids resuming it; "
            "choose another trainer.experiment_name, or trainer.resume_mode=auto"
        )
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Inputs of a run, read before any process starts."""

    algorithm: Algorithm
    rewards: Rewards
    episode_runner: EpisodeRunner  # close it in the event loop that uses it
    train: list[Sequence[Task]]
    val: dict[str, Sequence[Task]]
    online_eval: hooks.OnlineEval | None
    reports: list[RowReport]  # one per data file
    train_tasks: TrainTasks

    @property
    def reward_names(self) -> list[str]:
        """The distinct rewards of the training rows."""
        return list(dict.fromkeys(self.rewards.choice(task) for task in chain(*self.train)))

    def choices(self, tool_call_format: str | None) -> str:
        """What the run decided by its data and model, in one line."""
        validated = ", ".join(self.val) or "none, data.val_files and data.val_share are not set"
        style = tool_call_format or "none"
        return f"reward: {', '.join(self.reward_names)}; tool-call format: {style}; validation rows: {validated}"


@contextmanager
def _with_reports(reports: Iterable[RowReport]) -> Iterator[None]:
    """The error of a task has beside it what the reports, which are not printed yet, have found in its file."""
    try:
        yield
    except (ConfigError, DataError) as error:
        for report in reports:
            if report.notes:
                error.add_note(str(report))
        raise


def load_inputs(config: Config) -> Inputs:
    """Load algorithm, reward, tokenizer, environment, tasks and benchmarks. Raises ConfigError or DataError for invalid
    ones, ServiceDownError for unreachable services, before an engine has started and waits for them."""
    algorithm = algorithm_of(config)
    check_algorithm(algorithm, config)
    check_adapter(config)
    check_teacher(config)
    warn_of_other_prompts(config)
    chat = load_chat_template(config.model)
    episode_runner = build_episode_runner(config, chat)
    rewards = build_rewards(config.reward.name, config.reward.options)
    run_async(check_services([episode_runner, rewards.default]))
    train, val, reports = load_tasks(config, prompt_fn(episode_runner, rewards))
    run_async(check_services(services_of_rows(episode_runner, rewards, chain(*train, *val.values()))))
    with _with_reports(reports):
        check_rewards(algorithm, rewards.for_tasks(rewards.require_gold(chain(*train))))
        check_golds(episode_runner, rewards, chain(*train, *val.values()))
    _check_history(config, episode_runner)
    train_tasks = TrainTasks.of(chain(*train), TrainTasks.read(config.model.path))
    online_eval = hooks.BENCHMARKS.load()(config, chat) if config.eval.benchmarks else None
    allow = None if config.eval.allow_train_overlap else "eval.allow_train_overlap=true"
    for note in check_overlap(train_tasks, online_eval.tasks() if online_eval else {}, "this run", allow):
        _log.warning("%s", note)
    return Inputs(
        algorithm=algorithm,
        rewards=rewards,
        episode_runner=truncating(config.data, episode_runner),
        train=train,
        val=val,
        online_eval=online_eval,
        reports=reports,
        train_tasks=train_tasks,
    )


def _check_history(config: Config, episode_runner: EpisodeRunner) -> None:
    """For episodes of several turns, but for those of programs, whose histories are their own."""
    if episode_runner.limits.max_turns > 1 and config.env.name != "agent":
        note = check_history(episode_runner.observations, users=config.env.name != "tool")
        if note is not None:
            _log.warning("%s", note)


def warn_of_other_prompts(config: Config) -> None:
    """If the model is a checkpoint of a run that rendered its prompts in another way: it may not read these."""
    checkpoint = Path(str(config.model.path)).parent
    if not (checkpoint / STATE).is_file():
        return
    then = read_state(checkpoint).get("resume_config", {})
    now = {"env.tool_call_format": config.env.tool_call_format, "data.prompt_template": config.data.prompt_template}
    for key, value in now.items():
        if key in then and then[key] != value:
            message = "the model was trained with %s=%s, this run has %s=%s: it may not read these prompts"
            _log.warning(message, key, _written(then[key]), key, _written(value))


def _written(value: str | None) -> str:
    return "null" if value is None else value


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of a run. device: of the ranks"""

    workers: Workers
    scorer: Scorer
    device: str


StartProcesses = Callable[[Config, Algorithm, int, Path, Display], AbstractContextManager[Processes]]


@contextmanager
def start_processes(
    config: Config, algorithm: Algorithm, total_steps: int, folder: Path, display: Display
) -> Iterator[Processes]:
    """Ray with ranks and engines, and the scoring processes. The caller closes the workers."""
    environment = {name: os.environ[name] for name in TOGGLES if name in os.environ}
    slots, join = 2 * config.num_ranks + config.num_engines, config.trainer.nnodes > 1
    timeouts_s = config.trainer.stall_timeout_s, config.trainer.health_timeout_s
    display.phase("Ray")
    with (
        Cluster.start(slots, environment, timeouts_s[0], join, timeouts_s[1]) as cluster,
        crash_reported(folder),
        build_scorer(config) as scorer,
    ):
        device = choose_device(config.trainer, cluster.num_gpus)
        yield Processes(start_workers(config, cluster, algorithm, device, total_steps, display.phase), scorer, device)


@contextmanager
def start_run(
    config: Config, inputs: Inputs, folder: Path, display: Display, start: StartProcesses = start_processes
) -> Iterator[TrainingRun]:
    """Start all components of a run; they are shut down at the end of the block."""
    store = CheckpointStore(folder / "checkpoints", config.trainer.keep_last, config.trainer.keep_best)
    settings = resume_config(config, TRAIN)
    reads_weights = needs_reference(inputs.algorithm) or config.lora.enabled
    contents = contents_of(settings, reads_weights, chain(*inputs.train))
    saved = find_saved(store, COMMAND, settings, contents, config.trainer.allow_changed)
    stream = resumed_stream(config, inputs.train, saved)
    total_steps = config.trainer.total_training_steps or config.trainer.total_epochs * max(
        1, len(stream) // config.data.train_batch_size
    )
    display.total_steps = total_steps
    run_config = {**asdict(config), **prompt_record(inputs.episode_runner.observations.tool_call_format)}
    run = RunInfo(folder, config.trainer.experiment_name, config.trainer.project_name, run_config)
    trackers = build_trackers(config.trainer.logger, run, display)
    validates = config.trainer.test_freq > 0 and bool(inputs.val or inputs.online_eval)
    callbacks = build_callbacks(config.trainer.callbacks, validates)
    loaded = rounded_base(config, folder)
    with start(loaded, inputs.algorithm, total_steps, folder, display) as processes:
        workers, device = processes.workers, processes.device
        with closing_run(folder, trackers, workers):
            trainer = build_trainer(
                config,
                inputs,
                stream,
                workers,
                processes.scorer,
                PhaseTimer(display.phase),
                build_meter(workers.trainer, device, config.lora.enabled, inputs.algorithm.observation_coefficient > 0),
            )
            if (build_keeper := hooks.SAMPLES.find()) is not None:
                decode = inputs.episode_runner.chat.tokenizer.decode
                trainer.keeper = build_keeper(config, inputs.algorithm, folder, decode)
            rollout = trainer.rollouts.rollout
            display.watch(rollout.progress)
            val_rollout = replace(rollout, sampling=val_sampling(config, rollout.sampling))
            build_watch = hooks.COLLAPSE.find() if config.trainer.on_collapse == "warn" else hooks.COLLAPSE.load()
            build_recorder = hooks.REPLAY.load() if config.trainer.record else hooks.REPLAY.find()
            recorder = build_recorder(config, folder, device, total_steps) if build_recorder else None
            transcripts = Transcripts(folder)
            collapse = CollapsePolicy(
                action=config.trainer.on_collapse,
                store=store,
                file=folder / "collapses.jsonl",
                watch=build_watch(inputs.algorithm, config) if build_watch else hooks.NoWatch(),
            )
            checkpointing = Checkpointing(
                store=store,
                folder=folder,
                header={
                    "command": COMMAND,
                    "resume_config": settings,
                    "contents": contents,
                    "rewards": list(inputs.reward_names),
                },
                saved=saved,
                train_tasks=inputs.train_tasks,
                workers=workers.trainer,
                trainer=trainer,
                trackers=trackers,
                collapse=collapse,
                callbacks=callbacks,
                transcripts=transcripts,
                recorder=recorder,
            )
            yield TrainingRun(
                settings=config.trainer,
                total_steps=total_steps,
                validator=Validator(
                    inputs.val,
                    val_rollout,
                    inputs.rewards,
                    config.rollout.val_kwargs.n,
                    config.rollout_seed,
                    config.trainer.verl_names,
                ),
                online_eval=inputs.online_eval,
                checkpointing=checkpointing,
                display=display,
            )


def resumed_stream(config: Config, train: Sequence[Sequence[Task]], saved: Saved | None) -> TaskStream:
    """The stream from where the checkpoint left it, or from its start if a change was allowed that makes it another."""
    made_of = (train, config.data.weights, config.trainer.seed)
    anew = TaskStream(*made_of, shuffle=config.data.shuffle)
    if saved is None:
        return anew
    rollouts = saved.state["trainer"]["rollouts"]
    cursor = TaskCursor(**rollouts["data"])
    if "contents" in saved.state and not saved.changed:
        cursor = TaskCursor(cursor.drawn, anew.cursor.made_of)  # the same files may have other names
    if saved.changed and cursor.made_of != anew.cursor.made_of:
        _log.warning("the order of the training data starts anew: its rows, data.weights or trainer.seed have changed")
        rollouts["pending"] = []
        return anew
    return TaskStream(*made_of, cursor, config.data.shuffle)


@contextmanager
def closing_run(folder: Path, trackers: Trackers, workers: Workers | WorkerGroup) -> Iterator[None]:
    """Close both after the block. The shutdown deadline starts at an error, or once the trackers are closed."""
    with closing(workers):
        with closing(trackers), crash_reported(folder):
            yield
        start_shutdown_timer(0, regular=True)


def build_trainer(
    config: Config,
    inputs: Inputs,
    stream: TaskStream,
    workers: Workers,
    scorer: Scorer,
    timer: PhaseTimer,
    meter: Meter | None = None,
) -> PPOTrainer:
    algorithm, chat = inputs.algorithm, inputs.episode_runner.chat
    engine = EnginePool(
        workers.engines,
        workers.transport.sources,
        resolve_on_weight_sync(config),
        chat.tokenizer.decode,
        workers.restart_engine,
    )
    sampling = train_sampling(config, chat.stop_token_ids)
    learner = build_learner(config, algorithm, workers.trainer, timer)
    layouts = connect(config, learner.policy, workers.engines, workers.transport)
    rollout = GroupRollout(engine, scorer, sampling, inputs.episode_runner)
    rollouts = RolloutManager(config, algorithm, stream, rollout, inputs.rewards)
    weight_sync = build_weight_sync(config, learner.policy, engine, layouts, inputs, sampling)
    engine.restore = weight_sync.restore
    best_of_group = config.teacher.path == BEST_OF_GROUP
    demonstrate = demonstrations(inputs.episode_runner, best_of_group) if config.teacher.is_policy else None
    return PPOTrainer(rollouts=rollouts, learner=learner, weight_sync=weight_sync, meter=meter, demonstrate=demonstrate)


def resolve_on_weight_sync(config: Config) -> OnWeightSync | None:
    """None: on-policy, there are never responses in flight during a weight sync."""
    if not config.rollout.max_staleness:
        return None
    if config.rollout.on_weight_sync != "auto":
        return OnWeightSync(config.rollout.on_weight_sync)
    # A program sees its policy as a service: each response comes from one version.
    return OnWeightSync.FINISH if config.env.name == "agent" else OnWeightSync.CONTINUE


def train_sampling(config: Config, stop_token_ids: tuple[int, ...]) -> Sampling:
    if config.rollout.truncated:
        _log.warning(
            "rollout.top_p, top_k or repetition_penalty: responses are sampled off-policy, from a truncated "
            "distribution, but the update uses the log-probs of the full one. engine/kl measures this bias: the KL "
            "divergence of the sampled distribution from the policy, plus the engine's rounding"
        )
    return build_sampling(config, stop_token_ids)


def val_sampling(config: Config, training: Sampling) -> Sampling:
    """Sampling parameters of validation, independent of those of training except for the stop tokens and the length."""
    val, whole = config.rollout.val_kwargs, training.whole()
    if val.greedy:
        return replace(whole, temperature=0.0)
    return replace(whole, temperature=val.temperature, top_p=val.top_p, top_k=val.top_k)


def build_learner(config: Config, algorithm: Algorithm, ranks: WorkerGroup, timer: PhaseTimer) -> Learner:
    """Policy, reference, teacher and critic on the same ranks; the others only if the algorithm needs them."""
    packing = PackSettings(config.actor.max_tokens_per_pack)
    return Learner(
        config=config,
        algorithm=algorithm,
        policy=Policy(WorkerView(ranks, "policy"), packing),
        reference=Policy(WorkerView(ranks, "reference"), packing) if needs_reference(algorithm) else None,
        teacher=build_teacher(config, ranks) if algorithm.teacher_weight else None,
        critic=Critic(WorkerView(ranks, "critic"), packing) if algorithm.needs_critic else None,
        kl_control=build_kl_control(config.algorithm, algorithm),
        entropy_control=build_entropy_control(algorithm),
        timer=timer,
    )


def build_teacher(config: Config, ranks: WorkerGroup) -> Policy | TeacherServer | SelfTeacher:
    """On the ranks, or behind a URL, which is asked for its model and tokens. Raises ServiceDownError."""
    if config.teacher.url is None:
        name = "policy" if config.teacher.is_policy else "teacher"
        model = Policy(WorkerView(ranks, name), PackSettings(config.actor.max_tokens_per_pack))
        return SelfTeacher(model) if config.teacher.is_policy else model
    return connect_teacher(config)


def load_chat_template(config: ModelConfig) -> ChatTemplate:
    """The tokenizer with its chat template, and all end-of-turn tokens of the model."""
    assert config.path is not None
    key = "model.tokenizer_path" if config.tokenizer_path else "model.path"
    tokenizer = read_tokenizer(config.tokenizer_path or config.path, key)
    return ChatTemplate(tokenizer, end_tokens(config.path), template_options=config.chat_template_options)


def load_tasks(
    config: Config, prompt_ids: PromptIds
) -> tuple[list[Sequence[Task]], dict[str, Sequence[Task]], list[RowReport]]:
    """(training sets, validation sets by name, row report per file). prompt_ids: before truncation"""
    data = config.data
    names = _set_names(data.val_files)
    allowed = RowNames.of(config)
    read = [read_tasks(source, prompt_ids, data, allowed) for source in (*data.train_files, *data.val_files)]
    sets, reports = [tasks for tasks, _ in read], [report for _, report in read]
    num_train = len(data.train_files)
    train, val = sets[:num_train], sets[num_train:]
    if data.val_share:
        held_out = [
            split_rows(tasks, data.val_share, config.trainer.seed, report.num_rows)
            for tasks, report in zip(train, reports, strict=False)  # the reports of training files come first
        ]
        names, train, val = _set_names(data.train_files), [rest for rest, _ in held_out], [part for _, part in held_out]
    _check_batch(config, sum(map(len, train)))
    return train, dict(zip(names, val, strict=True)), reports


def _set_names(files: Sequence[str]) -> list[str]:
    names = [source_name(source) for source in files]
    if len(set(names)) < len(names):
        names = ["_".join(Path(each).with_suffix("").parts[-2:]) for each in files]
    return names


def _check_batch(config: Config, num_tasks: int) -> None:
    """Raises ConfigError if a batch would hold a task twice."""
    batch = config.data.train_batch_size
    if batch > num_tasks:
        hint = f"data.train_batch_size={num_tasks} actor.ppo_mini_batch_size={num_tasks}"
        raise ConfigError(
            f"data.train_batch_size={batch} exceeds the {num_tasks} tasks of the training data; set {hint}"
        )


def build_meter(workers: WorkerGroup, device: str, adapter: bool = False, observations: bool = False) -> Meter | None:
    """The MFU meter; None on CPU, whose peak FLOP/s is unknown."""
    if device == "cpu":
        return None
    info: ModelInfo = workers.call(TrainingRank.model_info)[0]
    sizes = info.parameters, info.layers, info.attention_width, info.head_parameters, info.selecting_parameters
    shape = DecoderShape(*sizes, states=info.state_products)
    return Meter(shape, peak_flops(info.device), workers.size, FROZEN if adapter else TRAINING, observations)


def build_weight_sync(
    config: Config,
    policy: Policy,
    engine: RolloutEngine,
    layouts: Sequence[BucketLayout],
    inputs: Inputs,
    sampling: Sampling,
) -> WeightSync:
    """Weight sync, checked on the first tokens of the first training prompts."""
    dtype = DTYPES[engine_dtype(config)]
    precision = torch.bfloat16 if torch.bfloat16 in (dtype, DTYPES[config.model.compute_dtype]) else torch.float32
    max_tokens = min(_PROBE_TOKENS, sampling.max_tokens)
    prompt_ids = prompt_fn(inputs.episode_runner)
    return WeightSync(
        policy=policy,
        engine=engine,
        layouts=layouts,
        probes=[tuple(prompt_ids(task))[:_PROBE_PROMPT_TOKENS] for task in inputs.train[0][:_NUM_PROBES]],
        sampling=replace(sampling.whole(), max_tokens=max_tokens, seed=config.trainer.seed),
        tolerance=_TOLERANCE[precision],
    )
