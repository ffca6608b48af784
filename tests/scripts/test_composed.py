"""The composed tasks: golds, held-out parts, mistakes, the tokenizer, and what the pretraining starts from."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import combinations
from pathlib import Path
from random import Random

import pytest
import torch
from pyarrow import parquet
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from scripts.composed import mistakes, rows, tokenizer
from scripts.composed.circuits import init_copying
from scripts.composed.lexicon import NEW_NOUNS, NOUNS, VERBS, is_new
from scripts.composed.mistakes import Mistakes
from scripts.composed.muon import orthogonalized
from scripts.composed.pretraining import batch_of, batches, loss_of
from scripts.composed.slots import SLOTS, Values
from scripts.composed.tasks import FAMILIES, Source
from scripts.mini.tokenizer import chat_text
from tests.support.tiny import save_untrained
from verl.config.load import load_config
from verl.data.tasks import to_task
from verl.formats.toolrl_text import parse_gold
from verl.pretrained import read_tokenizer
from verl.utils.reward_score.rlla import RllaOptions, score_response


def _score(response: str, gold: str) -> float:
    return score_response(response, gold, 0, RllaOptions()).score


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("new_tools", [False, True])
def test_the_gold_of_every_family_loads_and_earns_the_maximum(family: str, new_tools: bool) -> None:
    source = Source(Random(1), held_out=new_tools, new_tools=new_tools)
    for _ in range(50):
        task = source.draw_of(family)
        to_task(rows.as_row(task, task.gold, "train", 0), "row")
        assert _score(task.gold, task.gold) == (4.0 if task.calls else 1.0)
        named = {(tool.verb, tool.noun) for tool in task.tools}
        assert len(named) == len({tool.name for tool in task.tools}) == len(task.tools) >= 2
        assert all(is_new(*each) == new_tools for each in named)


def test_new_tools_are_a_fifth_of_the_combinations_and_those_with_new_nouns() -> None:
    held_out = sum(is_new(verb, noun) for verb in VERBS for noun in NOUNS) / (len(VERBS) * len(NOUNS))
    assert 0.15 < held_out < 0.25
    assert all(is_new(verb, noun) for verb in VERBS for noun in NEW_NOUNS)


def test_tools_of_any_terms_are_no_held_out_ones_and_a_request_repeats_their_terms() -> None:
    source = Source(Random(0), any_terms=1.0)
    tasks = [source.draw_of("single") for _ in range(300)]
    tools = [tool for task in tasks for tool in task.tools]
    assert not any(is_new(tool.verb, tool.noun) for tool in tools)
    assert {tool.noun for tool in tools} >= set(NEW_NOUNS)  # so their tokens are trained
    for task in tasks:
        wanted = task.calls[0].tool
        assert f"{wanted.verb} the {wanted.noun}" in task.turns[0].replace(wanted.verb.capitalize(), wanted.verb)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_thought_names_each_wanted_tool_as_its_description_does_and_all_values_as_the_user_does(family: str) -> None:
    source = Source(Random(0))
    for _ in range(50):
        task = source.draw_of(family)
        thought = task.gold[len("<think> ") : task.gold.index(". </think>")]
        described = {tool.listed.description.rstrip(".") for tool in task.tools}
        if family == "none":
            assert thought.endswith(" with none") and not described & {thought}
            continue
        purposes = {call.tool.purpose for call in task.wanted}
        assert purposes <= described
        assert [thought.count(each) for each in purposes] == [1] * len(purposes)
        dialogue = " ".join(task.turns)
        for part in re.split("[,;] ", thought):
            if part not in purposes:
                name, text = part.split(" ", 1)
                assert name in {p.name for call in task.wanted for p in call.tool.parameters}
                assert text in dialogue or text == "missing"
        assert thought.count(" missing") == (family == "missing")
        assert thought.count(";") == len(task.wanted) - 1


@pytest.mark.parametrize(("kind", "text", "value"), [("date", "3 May", "05-03"), ("time", "4 pm", "16:00")])
def test_a_value_is_normalized(kind: str, text: str, value: str) -> None:
    drawn = {SLOTS[kind].draw(Values(Random(seed), held_out=False)) for seed in range(4000)}
    assert {each.value for each in drawn if each.text == text} == {value}
    assert all(each.careless == each.text for each in drawn)


@pytest.mark.parametrize("kind", ["city", "code", "count", "date"])
def test_values_of_tests_do_not_occur_in_training(kind: str) -> None:
    seen, held_out = (
        {SLOTS[kind].draw(Values(Random(seed), part)).text for seed in range(3000)} for part in (False, True)
    )
    assert not seen & held_out and len(seen) > 2 * len(held_out) > 20


def test_names_of_a_row_share_no_syllable() -> None:
    values = Values(Random(0), held_out=False)
    names = [SLOTS["city"].draw(values).text.lower() for _ in range(8)]
    assert not any({a[:2]} & {b[:2]} or {a[2:]} & {b[2:]} for a, b in combinations(names, 2))


def test_demonstrations_without_mistakes_are_the_golds() -> None:
    source, right = Source(Random(0)), Mistakes(Random(0), scale=0.0)
    assert all(right.demonstrate(task) == task.gold for task in (source.draw() for _ in range(200)))


def test_a_mistake_has_its_rate_and_costs_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in mistakes.RATES:
        rates = dict.fromkeys(mistakes.RATES, 0.0) | {kind: mistakes.RATES[kind]}
        monkeypatch.setattr(mistakes, "RATES", rates)
        monkeypatch.setattr(mistakes, "_SPREAD", 0.0)
        source, drawn = Source(Random(2)), Mistakes(Random(3))
        family = {"first only": "multiple", "plain name": "masked", "reference": "dialogue", "call none": "none"}.get(
            kind, "missing" if kind == "invent" else "single"
        )
        tasks = [source.draw_of(family) for _ in range(1200)]
        if kind in {slot.group for slot in SLOTS.values()}:  # rows with one such value
            tasks = [task for task in tasks if [p.slot.group for p in task.calls[0].tool.parameters].count(kind) == 1]
        elif kind == "plain name":
            tasks = [task for task in tasks if len(task.calls) == 1]
        responses = [(drawn.demonstrate(task), task.gold) for task in tasks]
        wrong = [(response, gold) for response, gold in responses if response != gold]
        assert abs(len(wrong) / len(responses) - rates[kind]) < 0.1, kind
        assert all(_score(response, gold) < _score(gold, gold) for response, gold in wrong), kind
        monkeypatch.undo()


@pytest.fixture(scope="module")
def built():
    return rows.build(0)


def test_no_prompt_occurs_twice_and_the_files_follow_the_seed(built) -> None:
    everything = [row for each in built.values() for row in each]
    assert len({json.dumps(row["prompt"]) for row in everything}) == len(everything) == 7600
    assert Counter(len(each) for each in built.values()) == Counter([200, 200, 2400, 4800])
    assert rows.build(0)["test"] == built["test"] != rows.build(1)["test"]


@pytest.mark.parametrize("name", ["train", "test", "test_new_tools"])
def test_the_embedded_files_are_these_tasks_and_their_rows_fit_the_recipe(built, name: str) -> None:
    config = load_config(["recipe=composed_grpo"])
    files = [*config.data.train_files, *config.data.val_files]
    (file,) = (each for each in files if Path(each).stem == name)
    stored = parquet.read_table(file).to_pylist()
    assert stored == json.loads(json.dumps(built[name]))
    tokens = read_tokenizer(config.model.path)
    for row in stored:
        assert len(tokens(chat_text(row, with_response=False)).input_ids) <= config.data.max_prompt_length
        assert len(tokens(row["reward_model"]["ground_truth"]).input_ids) < config.data.max_response_length


def test_a_value_has_the_same_tokens_in_the_request_and_in_the_call(built) -> None:
    trained = tokenizer.train(chat_text(row) for row in built["train"])
    for row in built["test"]:
        prompt = trained.encode(chat_text(row, with_response=False)).tokens
        assert len(prompt) < 200
        for call in parse_gold(row["reward_model"]["ground_truth"]).calls or ():
            called = trained.encode(json.dumps(call)).tokens
            for value in call["parameters"].values():
                if isinstance(value, str) and re.fullmatch(r"[A-Z][a-z]{3}", value):
                    assert {value[:2], value[2:]} <= set(called)
                    assert value[2:] in prompt and {value[:2], "Ġ" + value[:2]} & set(prompt)


def test_the_untrained_model_attends_to_the_last_tokens_and_to_what_followed_the_same_token() -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=600,
        hidden_size=160,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=5,
        num_key_value_heads=5,
        tie_word_embeddings=True,
        initializer_range=0.06,
        attn_implementation="eager",
    )
    model = Qwen2ForCausalLM(config).eval()
    init_copying(model, torch.Generator().manual_seed(0))
    half = torch.stack([torch.randperm(600)[:40] for _ in range(8)])
    with torch.no_grad():
        weights = model(torch.cat([half, half], 1), output_attentions=True).attentions
    later = torch.arange(45, 79)
    for head, offset in enumerate((1, 2, 3)):
        assert weights[0][:, head, later, later - offset].mean() > 0.8
    assert weights[1][:, :2, later, later - 39].mean() > 0.2  # one after the earlier occurrence
    assert weights[1][:, 3:, later, later - 39].mean() < 0.05


def test_the_pretraining_loss_is_that_of_transformers_and_leaves_out_padding(tmp_path: Path) -> None:
    rows_of_tokens = [([5, 6, 7], [8, 9]), ([10, 11], [12])]
    batch = batch_of(rows_of_tokens)
    assert batch.ids.tolist() == [[5, 6, 7, 8, 9], [10, 11, 12, 0, 0]]
    assert batch.part.tolist() == [[0, 0, 0, 1, 1], [0, 0, 1, -1, -1]]
    save_untrained(tmp_path, 64, 1)
    model = Qwen2ForCausalLM.from_pretrained(tmp_path).eval()
    for weight, ignored in ((1.0, [-1]), (0.0, [-1, 0])):
        labels = batch.ids.masked_fill(torch.isin(batch.part, torch.tensor(ignored)), -100)
        expected = model(input_ids=batch.ids, labels=labels).loss
        torch.testing.assert_close(loss_of(model, batch, weight)[0], expected)


def test_batches_hold_all_tasks_within_the_limit_of_tokens(built) -> None:
    trained = tokenizer.train(chat_text(row) for row in built["train"])
    fast = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<|im_end|>")
    source = Source(Random(0))
    stream = batches(fast, source, Random(0), lambda task: task.gold, tokens=2048)
    drawn = [next(stream) for _ in range(30)]
    assert all(batch.ids.numel() <= 2048 for batch in drawn)
    filled = sum(int((batch.part >= 0).sum()) for batch in drawn) / sum(batch.ids.numel() for batch in drawn)
    assert filled > 0.9


@pytest.mark.parametrize("shape", [(8, 20), (20, 8)])
def test_an_orthogonalized_matrix_has_singular_values_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    values = torch.linalg.svdvals(orthogonalized(matrix))
    assert values.min() > 0.5 and values.max() < 1.3
    assert torch.equal(orthogonalized(matrix.T.contiguous()), orthogonalized(matrix).T) or shape[0] != shape[1]
