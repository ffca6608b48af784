"""The start check: gold responses through the tokens of a run, with tokenizers and templates of all kinds."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers
from transformers import AutoTokenizer

from tests.support.tokenizers import KINDS, TAGS, TEMPLATES, small_tokenizer
from tests.verl.chat.test_chat import TEMPLATES as FILES
from tests.verl.chat.test_native import chat_of
from toolrl.serve.openai_server.parsing import ResponseReader
from verl.build.env import prompt_fn
from verl.chat.observations import ObservationTokenizer
from verl.chat.template import ChatTemplate, Encoded, TurnFrame
from verl.config.schema import DataConfig
from verl.data.lengths import read_tasks
from verl.data.tasks import TaskSet
from verl.envs.registry import ClassFactory
from verl.envs.single_turn import SingleTurnEnv
from verl.envs.task_envs import TaskEnvs
from verl.episodes.episode import EpisodeLimits, EpisodeRunner
from verl.episodes.start_check import check_gold_tokens, check_golds, check_turns
from verl.errors import ConfigError, DataError
from verl.formats.base import TOOL_CALL_FORMATS, build_tool_call_format
from verl.formats.inline import InlineFormat
from verl.formats.prompt import TurnFormat
from verl.rollout.engine import Sampling
from verl.scoring.rewards import Rewards, build_rewards
from verl.sft.demonstrations import Demonstration, sft_samples
from verl.types import Completion, FinishReason, Message, Task, ToolCall, Trajectory
from verl.utils.reward_score.rlla import RllaOptions, RllaReward, compute_score

QUESTION = (Message("user", "How warm is it in Paris?"),)
RLLA = '<think> I look. </think>\n<tool_call>\n{"name": "weather", "parameters": {"city": "Paris"}}\n</tool_call>'
N1 = '[{"name": "weather", "arguments": {"city": "Paris"}}]'
WEATHER = ToolCall("weather", {"city": "Paris"})
GOLD = Message("assistant", "", (WEATHER,), calls_in_content=False)
# format: (reward, answer, gold turn)
SCORED = {
    "artist": ("search_r1", "21", None),
    "artist_tools": ("calls", "", GOLD),
    "fence": ("torl", "21", None),
    "hermes": ("calls", "", GOLD),
    "llama3_json": ("calls", "", GOLD),
    "openhands": ("calls", "", GOLD),
    "otc_search": ("search_r1", "21", None),
    "retool": ("retool", "21", None),
    "search_r1": ("search_r1", "21", None),
    "tags": ("search_r1", "21", None),
    "tool_n1": ("tool_n1", N1, None),
    "toolrl": ("rlla", RLLA, None),
    "toolrl_published": ("rlla", RLLA, None),
    "xml": ("calls", "", GOLD),
    "zerotir": ("zerotir", "21", None),
}
CHAT = {**TEMPLATES, "qwen3": (FILES / "qwen3.jinja").read_text()}
assert SCORED.keys() == TOOL_CALL_FORMATS.keys() - {"native"}


def runner_of(chat: ChatTemplate, name: str | None, **options: Any) -> EpisodeRunner:
    """Episodes of one turn."""
    style = build_tool_call_format(name or "hermes", options)
    if isinstance(style, TurnFormat) and chat.opens_thought:
        style = replace(style, in_thought=True)
    observations = ObservationTokenizer(chat, style, 512)
    return EpisodeRunner(TaskEnvs("single_turn", ClassFactory(SingleTurnEnv)), observations, EpisodeLimits())


def task_of(name: str) -> Task:
    reward, answer, gold = SCORED[name]
    return Task("rows#0", QUESTION, answer, "rows", reward=reward, gold=gold)


def check(chat: ChatTemplate, name: str, *tasks: Task, reward: str = "rlla") -> None:
    """What train and eval do at their start."""
    runner = runner_of(chat, name)
    check_turns(runner.observations)
    check_golds(runner, build_rewards(reward), tasks or (task_of(name),))


def demonstrated(chat: ChatTemplate, content: str, runner: EpisodeRunner | None = None) -> list[int]:
    """The tokens that SFT trains."""
    rows = [Demonstration((*QUESTION, Message("assistant", content)), 1)]
    (sample,) = sft_samples(rows, chat, 4096, observations=runner and runner.observations)
    return [int(token) for token, own in zip(sample.token_ids, sample.action_mask, strict=True) if own]


def chats(kind: str) -> list[tuple[str, ChatTemplate]]:
    """Every template with a tokenizer of the kind: tags of its vocabulary or not, ends of instruction and base models.

    A space before every part of a text (`always`, `prepend`) falls between a tag of the vocabulary and what follows.
    """
    ends = {"special": "<|im_end|>", "plain": "<|endoftext|>", "none": "<|endoftext|>"}
    found = []
    for name, template in CHAT.items():
        for tags, end in ends.items():
            if tags == "none" or kind in ("bytes", "first"):
                own, eos = () if tags == "none" else TAGS, "</s>" if name == "inst" else end
                made = small_tokenizer(kind, template, tags == "special", eos, own)
                found.append((f"{name}, {tags}, {eos}", ChatTemplate(made)))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_tokenizer_template_and_format_trains_and_scores_what_is_meant(kind: str) -> None:
    """train and eval: the gold response earns the maximum. sft: the tokens are the template's own. serve: the calls."""
    for where, chat in chats(kind):
        for name in SCORED:
            runner = runner_of(chat, name)
            try:
                check(chat, name)
                for content in ("Yes: 21.", "<think>\nI know.\n</think>\n\nYes: 21."):
                    if not runner.observations.raw and not (chat.opens_thought and "</think>" not in content):
                        assert demonstrated(chat, content, runner) == in_template(chat, content)
                style = runner.observations.tool_call_format
                call = style.call("Paris") if isinstance(style, InlineFormat) else WEATHER
                rendered = style.render((call,))
                text = "" if name == "llama3_json" else "I look.\n"  # its calls are the whole response
                _, (ids, _) = chat.response(chat.question_ids, text + rendered, runner.observations.raw)
                read = ResponseReader(style).read(chat.response_text(ids))
                assert read.calls == (call,) and read.content.strip().endswith(text.strip()), read
            except (AssertionError, ConfigError) as error:
                raise AssertionError(f"{where}, {name}: {error}") from error


def in_template(chat: ChatTemplate, content: str) -> list[int]:
    """The tokens of a turn in the template's own rendering, from the prompt to the end token."""
    prompt = chat.prompt_ids(QUESTION)
    whole = list(chat.encoded(chat.rendered((*QUESTION, Message("assistant", content)), (), False))[0])
    end = whole.index(chat.end_token_id, len(prompt))
    return whole[len(prompt) : end + 1]


class SkipsSpecialTokens(ChatTemplate):
    def response_text(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


class ForgetsTheOpenedThought(ChatTemplate):
    def turn_of(
        self, context_ids: Sequence[int], token_ids: Sequence[int], before: Sequence[int] = ()
    ) -> tuple[Message, str]:
        return Message("assistant", self.response_text(token_ids)), ""


class EncodesTextsAlone(ChatTemplate):
    def response_ids(self, text: str) -> Encoded:
        return self.encoded(text)


class EndsWithEos(ChatTemplate):
    @property
    def end_token_id(self) -> int:  # type: ignore[override]
        return int(self.tokenizer.eos_token_id)


class LeavesOutTheEmptyThought(ChatTemplate):
    @property
    def frame(self) -> TurnFrame:  # type: ignore[override]
        return replace(ChatTemplate(self.tokenizer).frame, lead="")


@pytest.mark.parametrize(
    ("broken", "kind", "template", "special", "eos", "names", "message"),
    [
        (SkipsSpecialTokens, "bytes", "chatml", True, "<|im_end|>", ("toolrl", "tool_n1", "search_r1"), "is read as"),
        (ForgetsTheOpenedThought, "bytes", "opened", False, "<|im_end|>", ("toolrl", "tool_n1"), "is read as"),
        (EncodesTextsAlone, "first", "chatml", False, "<|im_end|>", ("hermes", "toolrl"), "has other tokens"),
        (EncodesTextsAlone, "prepend", "chatml", False, "<|im_end|>", ("hermes", "toolrl"), "has other tokens"),
        (EncodesTextsAlone, "always", "opened", False, "<|im_end|>", ("hermes", "toolrl"), "has other tokens"),
        (EndsWithEos, "bytes", "chatml", False, "<|endoftext|>", ("hermes", "toolrl"), "rather than with a token"),
        (LeavesOutTheEmptyThought, "bytes", "empty_thought", False, "<|im_end|>", ("hermes",), "has other tokens"),
        (LeavesOutTheEmptyThought, "first", "qwen3", False, "<|im_end|>", ("hermes",), "has other tokens"),
    ],
)
def test_a_run_that_would_train_on_other_texts_or_tokens_is_refused(
    broken: type[ChatTemplate],
    kind: str,
    template: str,
    special: bool,
    eos: str,
    names: Sequence[str],
    message: str,
) -> None:
    tokenizer = small_tokenizer(kind, CHAT[template], special, eos, TAGS if kind == "bytes" else ())
    for name in names:
        check(ChatTemplate(tokenizer), name)
        with pytest.raises(ConfigError, match=message):
            check(broken(tokenizer), name)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (TEMPLATES["chatml"].partition("{% if add")[0], "ignores add_generation_prompt"),
        (TEMPLATES["chatml"].replace("if add_generation_prompt", "if false"), "ignores add_generation_prompt"),
        (TEMPLATES["chatml"].replace("assistant\n", "model\n"), "does not continue its own generation prompt"),
        (TEMPLATES["chatml"].replace("+ m['content'] +", "+"), "does not render the text of the assistant"),
        (TEMPLATES["chatml"].replace("<|im_end|>", "<|end|>"), "rather than with a token"),
    ],
)
def test_a_template_that_does_not_frame_a_turn_is_refused(template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_turns(runner_of(ChatTemplate(small_tokenizer("bytes", template)), "toolrl").observations)


@pytest.mark.parametrize(("toggle", "maximum"), [("WITHLENGTH", 5.0), ("SCHEDULEREWARD", 4.0), ("CORRECTMAX1", 2.0)])
def test_toolrls_switches_change_the_maximum_and_the_gold_response_still_earns_it(
    toggle: str, maximum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The placeholder thought of a row earns a 512th of the length part; the reward's own gold response all of it."""
    monkeypatch.setenv(toggle, "1")
    chat = ChatTemplate(small_tokenizer("bytes", "chatml"))
    task = replace(task_of("toolrl"), reward=None)
    rewards = build_rewards("rlla")
    assert rewards.maximum(task, 1) == pytest.approx(maximum, abs=0.1)
    check(chat, "toolrl", task)


def test_one_bad_row_is_let_through_and_a_reward_whose_gold_never_wins_is_not() -> None:
    chat = ChatTemplate(small_tokenizer("bytes", "chatml"))
    bad = replace(task_of("toolrl"), answer=RLLA.replace("</think>\n", "</think>"), id="rows#1")  # misses its format
    check(chat, "toolrl", task_of("toolrl"), bad)
    with pytest.raises(ConfigError, match=r"gives the gold response of rows#1 3 of 4"):
        check(chat, "toolrl", bad)


@pytest.mark.parametrize(
    ("template", "quoted", "usable"),
    [
        ("chatml", "<|im_end|>", False),
        ("chatml", "<|endoftext|>", False),  # the model's configuration may stop at it
        ("chatml", "<|im_start|>assistant", False),  # ToolRL scores what follows it
        ("opened", "<|im_end|>", False),
        ("inst", "</s>", False),
        ("inst", "[INST] Go on [/INST]", True),  # earns the maximum all the same
        ("chatml", "</s>", True),
        ("chatml", "<|im_end |>", True),
        ("chatml", "\\u003c|im_end|\\u003e", True),
    ],
)
def test_a_gold_that_quotes_a_control_token_is_a_bad_row(
    template: str, quoted: str, usable: bool, tmp_path: Path
) -> None:
    """One clear error with file and row, or a dropped row: the run goes on with the others."""
    tokenizer = small_tokenizer("bytes", template, eos="</s>" if template == "inst" else "<|im_end|>")
    stops = () if template == "inst" else (tokenizer.convert_tokens_to_ids("<|endoftext|>"),)
    runner, rewards = runner_of(ChatTemplate(tokenizer, stops), "toolrl"), build_rewards("rlla")
    answers = [RLLA] * 8
    answers[3] = RLLA.replace("Paris", quoted)
    path = tmp_path / "rows.jsonl"
    row = {"prompt": [{"role": "user", "content": "How warm?"}], "data_source": "rlla"}
    path.write_text("".join(json.dumps({**row, "reward_model": {"ground_truth": each}}) + "\n" for each in answers))
    with nullcontext() if usable else pytest.raises(DataError) as refused:
        read_tasks(str(path), prompt_fn(runner, rewards), DataConfig())
    if refused is not None:
        message = str(refused.value)
        assert "rows.jsonl" in message and "row 3" in message and f"contains {quoted[:10]!r}"[:-1] in message
        assert "max_bad_share" in message
    tasks, report = read_tasks(str(path), prompt_fn(runner, rewards), DataConfig(max_bad_share=0.2))
    assert [len(tasks), len(report.bad)] == ([8, 0] if usable else [7, 1])
    check_golds(runner, rewards, tasks)
    check_golds(runner, rewards, TaskSet(str(path)))  # an evaluation's rows: the bad one is reported at its turn


@pytest.mark.parametrize(
    ("reward", "good", "bad", "problem"),
    [
        ("tool_n1", N1, "#### 72", "the gold calls cannot be parsed: '#### 72'"),
        ("tool_n1", N1, '[{"name": "weather", "arguments": {"city": NaN}}]', "NaN is not a number"),
        ("tool_n1", N1, '[{"name": "weather"}]', "the gold calls cannot be parsed"),
        ("rlla", RLLA, RLLA.replace('"Paris"}}', '"Paris"'), "line 1 of the gold calls is not JSON"),
        ("rlla", RLLA, RLLA.replace("Paris", "<tool_call>"), "line 1 of the gold calls is not JSON"),
        ("rlla", RLLA, RLLA.replace("I look.", "<|start_header_id|>assistant<|end_header_id|>"), "a mark of turns"),
        ("rlla", RLLA, RLLA.replace("Paris", "<|eot_id|>"), "contains '<|eot_id|>', a mark of turns"),
        ("rlla", f"{RLLA}<|eot_id|>", RLLA.replace("Paris", "<|eot_id|>"), "a mark of turns"),  # a policy may end there
        ("api_bank", '{"name": "a", "parameters": {}}', '{"name": "a"}', """the gold call is '{"name": "a"}'"""),
        ("api_bank", '{"name": "a", "parameters": {}}', "get()", "the gold call is 'get()'"),
        ("bfcl", '"any"', "any", "not a BFCL key"),
        ("search_r1", "Paris", '{"answers": ["Paris"]}', 'expected {"target": a text, or several}'),
    ],
)
def test_a_gold_that_a_reward_cannot_read_is_a_bad_row(
    reward: str, good: str, bad: str, problem: str, tmp_path: Path
) -> None:
    """Whatever the source of the rows: reported with file and row before the run, not as a fault of its episodes."""
    runner, rewards = runner_of(ChatTemplate(small_tokenizer("bytes", "chatml")), "toolrl"), build_rewards(reward)
    path = tmp_path / "rows.jsonl"
    row = {"prompt": [{"role": "user", "content": "q"}], "data_source": "mine", "extra_info": {"tools": []}}
    path.write_text("".join(json.dumps({**row, "reward_model": {"ground_truth": each}}) + "\n" for each in (good, bad)))
    with pytest.raises(DataError) as refused:
        read_tasks(str(path), prompt_fn(runner, rewards), DataConfig())
    assert all(part in str(refused.value) for part in ("rows.jsonl", "row 1", problem)), refused.value
    tasks, _ = read_tasks(str(path), prompt_fn(runner, rewards), DataConfig(max_bad_share=0.5))
    assert [task.answer for task in tasks] == [good]


def test_a_gold_turn_whose_call_quotes_the_end_token_is_a_bad_row_too() -> None:
    chat = ChatTemplate(small_tokenizer("first", "chatml", tags=TAGS))
    runner, rewards = runner_of(chat, "hermes"), build_rewards("calls")
    gold = replace(GOLD, tool_calls=(ToolCall("weather", {"city": "Paris<|im_end|>"}),))
    good, bad = task_of("hermes"), replace(task_of("hermes"), gold=gold, id="rows#1")
    check_gold_tokens(runner, rewards, good)
    with pytest.raises(DataError, match=r"contains '<\|im_end\|>', a control token of the model: reward 'calls' gives"):
        check_gold_tokens(runner, rewards, bad)
    check_golds(runner, rewards, [good, bad])
    with pytest.raises(DataError, match=r"^rows, row 1: .* is read as"):
        check_golds(runner, rewards, [bad])


def test_a_model_may_stop_at_a_token_that_the_tokenizer_lacks() -> None:
    """Models have padded vocabularies."""
    tokenizer = small_tokenizer("bytes", "chatml")
    chat = ChatTemplate(tokenizer, more_stops=(len(tokenizer) + 7,))
    check(chat, "toolrl")
    assert chat.control_tokens("a <|im_end|> b <|im_start|> <think> </s>") == ["<|im_end|>", "<|im_start|>"]
    assert chat.control_tokens("a <|im_end|> b <|im_start|>", raw=True) == ["<|im_end|>"]
    opened = ChatTemplate(small_tokenizer("bytes", "opened", special=True))
    assert opened.control_tokens("<think> </think> <tool_call> <|im_start|>") == ["<|im_start|>"]


def test_a_part_of_a_sum_is_tried_too() -> None:
    tokenizer = small_tokenizer("bytes", "chatml", special=True)
    task = replace(task_of("toolrl"), reward=None)
    terms = {"terms": ["rlla", {"name": "search_r1", "weight": 0.0}]}
    for made, fails in ((ChatTemplate(tokenizer), False), (SkipsSpecialTokens(tokenizer), True)):
        with pytest.raises(ConfigError, match="'rlla', a part of the sum, gives the gold") if fails else nullcontext():
            check_golds(runner_of(made, "toolrl"), build_rewards("sum", terms), [task])


@pytest.mark.parametrize("weight", [1.0, 0.0, -0.5])
@pytest.mark.parametrize("place", [0, 1])
def test_a_part_of_a_sum_that_never_earns_its_maximum_is_named_with_its_value(weight: float, place: int) -> None:
    """The sum itself has no maximum, so that its value would mean nothing."""
    terms: list[Any] = ["search_r1"]
    terms.insert(place, {"name": "rlla", "weight": weight})
    bad = replace(task_of("toolrl"), answer=RLLA.replace("</think>\n", "</think>"), reward=None)
    runner = runner_of(ChatTemplate(small_tokenizer("bytes", "chatml")), "toolrl")
    with pytest.raises(
        ConfigError,
        match=r"reward 'rlla', a part of the sum, gives .* 3 of 4: .*choose another entry of reward=\[\.\.\]",
    ):
        check_golds(runner, build_rewards("sum", {"terms": terms}), [bad])


def test_a_part_of_a_sum_that_fails_is_named() -> None:
    runner = runner_of(ChatTemplate(small_tokenizer("bytes", "chatml")), "toolrl")
    rewards = build_rewards("sum", {"terms": [f"{__name__}:WithoutMaximum"]})
    with pytest.raises(ConfigError, match=r"WithoutMaximum', a part of the sum, fails on the gold response of rows#0"):
        check_golds(runner, rewards, [replace(task_of("toolrl"), reward=None)])


def test_a_tokenizer_without_a_path_is_named_by_its_class(tmp_path: Path) -> None:
    tokenizer = small_tokenizer("bytes", "chatml")
    assert ChatTemplate(tokenizer).where == "the chat template of a TokenizersBackend without a path"
    tokenizer.save_pretrained(tmp_path)
    assert ChatTemplate(AutoTokenizer.from_pretrained(tmp_path)).where.endswith(f"the tokenizer in '{tmp_path}'")
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="a TokenizersBackend without a path has no chat template"):
        ChatTemplate(tokenizer)


@dataclass(frozen=True)
class Judged:
    """A reward without a gold response, as one with a judge or a service."""

    def score(self, trajectory: Any, task: Task, step: int) -> Any:
        raise AssertionError("called")


def test_rewards_without_a_gold_response_are_not_called() -> None:
    chat = ChatTemplate(small_tokenizer("bytes", "chatml"))
    check_golds(runner_of(chat, "hermes"), Rewards(Judged()), [replace(task_of("hermes"), reward=None)])


class WithoutMaximum(RllaReward):
    def maximum(self, task: Task, step: int) -> Any:
        return None


def test_a_reward_whose_maximum_is_no_number_is_named() -> None:
    runner = runner_of(ChatTemplate(small_tokenizer("bytes", "chatml")), "toolrl")
    with pytest.raises(ConfigError, match="reward 'mine' fails on the gold response of rows#0"):
        check_golds(runner, Rewards(WithoutMaximum(), "mine"), [replace(task_of("toolrl"), reward=None)])


def test_a_tokenizer_that_changes_texts_is_refused() -> None:
    """Lower case, as in old encoders, is lost in every call and every gold response."""
    tokenizer = small_tokenizer("bytes", "chatml")
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(ConfigError, match=r"has other tokens|loses the calls|is read as"):
        check(ChatTemplate(tokenizer), "toolrl")


def test_a_gold_response_that_no_policy_could_finish_is_refused() -> None:
    """A stop token inside it ends it."""
    tokenizer = small_tokenizer("bytes", "chatml")
    inside = tokenizer.convert_tokens_to_ids("</tool_call>")
    with pytest.raises(DataError, match=r"contains '</tool_call>', a control token of the model: .* is read as"):
        check(ChatTemplate(tokenizer, more_stops=(inside,)), "toolrl")


IM_START = "<|im_start|>assistant\n"
GOOD, BAD = RLLA, "I do not know."


@pytest.mark.parametrize(
    ("written", "end", "total"),
    [
        (GOOD, "<|im_end|>", 4.0),
        (GOOD, "<|endoftext|>", 3.0),  # no end marker: the token belongs to the text, and the format is lost
        (f"<|im_start|>{GOOD}", "<|im_end|>", 3.0),
        (f"{BAD}<|im_end|>\n{IM_START}{GOOD}", "<|im_end|>", -3.0),  # it ended before
        (f"{BAD}\n{IM_START}{GOOD}", "<|im_end|>", 4.0),
        (f"{GOOD}\n{IM_START}{BAD}", "<|im_end|>", -3.0),
        (f"{GOOD}\n{IM_START}", "<|endoftext|>", -3.0),
        (f"{GOOD}<|endoftext|>{BAD}", "<|im_end|>", 3.0),  # where the model's configuration does not stop at it
        (f"<s>{GOOD}", "<|endoftext|>", 3.0),
    ],
)
def test_control_tokens_of_the_policy_count_as_in_toolrl(written: str, end: str, total: float) -> None:
    """ToolRL scores the decoded sequence from the last assistant marker to the first end marker."""
    tokenizer = small_tokenizer("bytes", "chatml")
    task = replace(task_of("toolrl"), reward=None)
    stops = [tokenizer.convert_tokens_to_ids(stop) for stop in ("<|im_end|>", end)]
    chat = ChatTemplate(tokenizer, () if "<|endoftext|>" in written else tuple(stops))
    ids = list(tokenizer(written + end, add_special_tokens=False)["input_ids"])
    first = next(place for place, token in enumerate(ids) if token in chat.stop_token_ids)

    class Exact:
        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
            text = ids[: first + 1]
            return (Completion(text, [0.0] * len(text), FinishReason.STOP, 0),)

    runner = runner_of(chat, "toolrl")
    episode = asyncio.run(runner.run(Exact(), Sampling(4000), task, 0, None))
    assert isinstance(episode, Trajectory)
    decoded = tokenizer.decode([*chat.prompt_ids(QUESTION), *ids[: first + 1]])
    assert (
        RllaReward().score(episode, task, 1).total == compute_score(decoded, task.answer, 1, RllaOptions())[0] == total
    )


MISTRAL = ("tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3")
PUBLISHED = (  # chat templates in TRL's package
    *("cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "gemma4", "glm4moe", "gptoss"),
    *("lfm2", "llama3", "llama3_1", "llama3_2", "nemotron_3_nano", "nemotron_3_super", "phi3", "phi3_5"),
    *("qwen2_5", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_instruct_2507"),
)


@pytest.mark.parametrize("file", MISTRAL)
def test_mistrals_own_tokenizers_keep_the_beginning_of_a_text(file: str, tmp_path: Path) -> None:
    if (found := find_spec("mistral_common")) is None or found.origin is None or find_spec("sentencepiece") is None:
        pytest.skip("mistral_common, whose package has Mistral's tokenizers, or sentencepiece is not installed")
    shutil.copy(Path(found.origin).parent / "data" / file, tmp_path / "tokenizer.model")
    options = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**options, "legacy": False}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = TEMPLATES["inst"]
    chat = ChatTemplate(tokenizer)
    for name in SCORED:
        check(chat, name)
    assert tokenizer.convert_ids_to_tokens(demonstrated(chat, "The answer")) == ["The", "▁answer", "</s>"]
    assert tokenizer.convert_ids_to_tokens(chat.continuation_ids("\nThe")) == ["<0x0A>", "The"]
    with pytest.raises(ConfigError, match="has other tokens"):
        check(EncodesTextsAlone(tokenizer), "toolrl")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_chat_templates_frame_turns_that_earn_their_reward(name: str) -> None:
    chat = chat_of(name)
    assert chat.frame.lead.strip().removeprefix("<think>").strip() in ("", "</think>") or name == "gptoss"
    end = chat.tokenizer.convert_ids_to_tokens(chat.end_token_id)
    assert chat.frame.end.startswith(end) or (name == "glm4moe" and not chat.frame.end)
    for each in ("toolrl", "tool_n1", "retool"):
        check(chat, each)


@pytest.mark.parametrize(
    ("template", "content", "trained"),
    [
        ("opened", "Yes.", "\n</think>\n\nYes.<|im_end|>"),
        ("opened", "<think>\nI know.\n</think>\n\nYes.", "I know.\n</think>\n\nYes.<|im_end|>"),
        ("opened", "<think>I know.</think>Yes.", "I know.</think>Yes.<|im_end|>"),
        ("opened", "I know.</think>Yes.", "I know.</think>Yes.<|im_end|>"),
        ("empty_thought", "Yes.", "<think>\n\n</think>\n\nYes.<|im_end|>"),
        ("empty_thought", "<think>I know.</think>Yes.", "<think>I know.</think>Yes.<|im_end|>"),
        ("chatml", "Yes. ", "Yes. <|im_end|>"),
        ("line_below", "Yes.", "\nYes.<|im_end|>"),
        ("line_below", "<think>I know.</think>Yes.", "\n<think>I know.</think>Yes.<|im_end|>"),
        ("line_below", "</think>Yes.", "\n</think>Yes.<|im_end|>"),
        ("glm", "Yes.", "\n<think></think>\nYes.<|im_end|>"),
        ("glm", "<think>I know.</think>\nYes.", "\n<think>I know.</think>\nYes.<|im_end|>"),
    ],
)
def test_a_demonstration_goes_on_where_the_prompt_ends(template: str, content: str, trained: str) -> None:
    """No tag is trained twice, and no answer inside a thought that the prompt has opened. White space with which the
    template begins a turn is trained with and without a thought."""
    chat = ChatTemplate(small_tokenizer("bytes", template, eos="<|endoftext|>"))
    assert chat.tokenizer.decode(demonstrated(chat, content)) == trained


@pytest.mark.parametrize("thought", ["<think></think>", "<think>\n\n</think>\n\n"])
@pytest.mark.parametrize("kept", ["", "<think>\n\n</think>\n\n"])
def test_a_prompt_may_end_with_an_empty_thought_that_finished_turns_lack(thought: str, kept: str) -> None:
    """Templates without thinking: the answer follows the prompt directly, whatever stands in a finished turn."""
    template = TEMPLATES["opened"].replace("<think>\n", thought)
    if kept:
        template = template.replace(
            "+ m['content']", f"+ ('{kept}' if m['role'] == 'assistant' else '') + m['content']"
        )
    for kind in KINDS:
        chat = ChatTemplate(small_tokenizer(kind, template, tags=TAGS if kind in ("bytes", "first") else ()))
        for name in SCORED:
            check(chat, name)
        assert demonstrated(chat, "Yes.") == [*chat.response_ids("Yes.")[0], chat.end_token_id]


def test_quoted_tool_output_is_masked_behind_an_opened_thought_too() -> None:
    chat = ChatTemplate(small_tokenizer("bytes", "opened"))
    text = "<think>\nI know.\n</think>\n<result>21</result> Yes."
    assert chat.tokenizer.decode(demonstrated(chat, text)) == "I know.\n</think>\n Yes.<|im_end|>"
