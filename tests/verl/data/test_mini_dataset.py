"""The embedded data set: what is committed is what the script makes, and agrees with dataset/mini/README.md."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from hashlib import sha256

import pyarrow.parquet as pq
import pytest

from scripts.mini import domains, phrases, reading
from scripts.mini.baselines import BASELINES, mean_reward
from scripts.mini.build import CARELESS, build
from scripts.mini.checks import check_splits
from scripts.mini.tokenizer import TAGS, chat_text
from scripts.mini.tools import read_tools
from scripts.mini.values import split_values
from scripts.raw.rlla import CALL_THOUGHT, RESPONSE_THOUGHT, SCHEMA
from tests.conftest import ROOT
from tests.support.every import every
from verl.formats.toolrl_text import THINK, THINK_END, parse_gold
from verl.utils.reward_score.rlla import compute_score

MINI = ROOT / "dataset" / "mini"
ROWS = {"train": 2400, "sft": 4800, "test": 200, "test_new_tools": 200}


@pytest.fixture(scope="module")
def splits():
    return {name: pq.read_table(MINI / f"{name}.parquet").to_pylist() for name in ROWS}


@pytest.fixture(scope="module")
def tokenizer():
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(MINI / "tokenizer")


@pytest.mark.parametrize("name", ROWS)
def test_files_have_toolrls_schema_and_the_promised_rows(name):
    table = pq.read_table(MINI / f"{name}.parquet")
    assert table.schema.equals(SCHEMA)
    assert table.num_rows == ROWS[name]


def test_the_data_are_small():
    """Beside the model, whose size tests/verl/trainer/test_learning.py holds."""
    files = [path for path in MINI.rglob("*") if path.is_file() and path.parent.name != "model"]
    assert sum(path.stat().st_size for path in files) < 4e6


def test_readme_gives_the_files_hashes():
    readme = (MINI / "README.md").read_text(encoding="utf-8")
    for path in (*MINI.glob("*.parquet"), MINI / "tokenizer" / "tokenizer.json"):
        assert sha256(path.read_bytes()).hexdigest() in readme, path


@pytest.mark.long
def test_rows_and_splits_pass_the_scripts_checks(splits):
    check_splits(splits)


def test_held_out_sentences_requests_and_values_are_other_ones():
    for seen, held_out in (phrases.ONE, phrases.TWO, phrases.LISTS, phrases.STATED):
        assert not set(seen) & set(held_out)
    tools = read_tools(domains.TOOLS)
    requests = {request for tool in tools for request in tool.requests}
    assert not requests & {request for tool in tools for request in tool.held_out_requests}
    seen_values, held_out_values = split_values(seed=0)
    for kind, pool in seen_values.pools.items():
        assert not set(pool) & set(held_out_values.pools[kind])


def test_checks_notice_a_training_phrasing_in_a_test(splits):
    with pytest.raises(AssertionError, match="test: "):
        check_splits({**splits, "test": [*splits["test"], _with_new_values(splits["train"])]})


def _with_new_values(rows):
    """A training row about a city that no row names."""
    row = next(row for row in rows if reading.family(row) == "single" and "get_rain" in reading.gold(row))
    (value,) = reading.values(row)
    name = value.strip('"')
    prompt = [{**message, "content": message["content"].replace(name, "Zuvu")} for message in row["prompt"]]
    return {**row, "prompt": prompt, "reward_model": {"ground_truth": reading.gold(row).replace(name, "Zuvu")}}


@pytest.mark.parametrize("name", ROWS)
def test_every_family_has_enough_rows_and_phrasings(splits, name):
    rows = splits[name]
    count = Counter(map(reading.family, rows))
    assert set(count) == {"single", "multiple", "parallel", "irrelevant", "dialogue", "masked"}
    assert min(count.values()) >= len(rows) // 25
    if name == "train":
        for family in count:
            assert len({reading.phrasing(row) for row in rows if reading.family(row) == family}) >= 30


def test_thoughts_are_placeholders_in_rl_rows_and_short_in_sft_rows(splits):
    for name, rows in splits.items():
        for row in rows:
            thought = reading.gold(row).partition(THINK)[2].partition(THINK_END)[0].strip()
            if name == "sft":
                assert 3 <= len(thought.split()) <= 15
            else:
                assert thought == (RESPONSE_THOUGHT if reading.family(row) == "irrelevant" else CALL_THOUGHT)


@pytest.mark.long
def test_careless_demonstrations_think_of_every_call_and_make_the_first(splits):
    careful = build(seed=0, careless=0.0)
    assert every(splits[name] == careful[name] for name in ROWS if name != "sft")
    cut = kept = 0
    for row, whole in zip(splits["sft"], careful["sft"], strict=True):
        assert row["prompt"] == whole["prompt"]
        assert reading.gold(row).partition(THINK_END)[0] == reading.gold(whole).partition(THINK_END)[0]
        made, due = (parse_gold(reading.gold(each)).calls or [] for each in (row, whole))
        assert made in (due, due[:1])
        if len(due) > 1:
            cut, kept = cut + (made != due), kept + (made == due)
    assert cut + kept > len(splits["sft"]) // 2
    assert cut / (cut + kept) == pytest.approx(CARELESS, abs=0.03)


def test_values_resist_mixing_up():
    for values in split_values(seed=0):
        for name in values.pools["name"]:
            assert len(name) == 4 and name[1] == name[3]
        for kind in ("int", "sum", "float"):
            for value in values.pools[kind]:
                digits = str(value).replace(".", "").rstrip("0")
                assert digits[0] < digits[1] and len(digits) == 2


def test_gold_scores_the_maximum_and_simple_policies_do_not(splits):
    for row in splits["test"]:
        maximum = 1.0 if reading.family(row) == "irrelevant" else 4.0
        assert compute_score(reading.gold(row), reading.gold(row))[0] == maximum
    assert mean_reward(splits["test"], BASELINES["copy the first tool"]) < -1.0
    assert mean_reward(splits["test"], BASELINES["always respond"]) < -1.0


def test_tokenizer_returns_any_text_unchanged(tokenizer, splits):
    texts = ['naïve\u00a0 café\n\n\t"日本語" 🦊  <think> a</think>', "".join(map(chr, range(1, 0x800)))]
    texts += [text for row in splits["test"] for text in (reading.system_text(row), reading.gold(row))]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tags_are_single_tokens_that_decoding_keeps(tokenizer):
    for tag in TAGS:
        (token,) = tokenizer.encode(tag)
        assert tokenizer.decode([token, tokenizer.eos_token_id], skip_special_tokens=True) == tag


def test_tokenizer_has_its_special_tokens_and_size(tokenizer):
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert len(tokenizer) == 1024


def test_template_is_chatml_and_prompts_are_short(tokenizer, splits):
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    lengths = []
    for row in splits["test"]:
        text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        assert text == chat_text(row, with_response=False)
        lengths.append(len(tokenizer.encode(text)))
    assert max(lengths) <= 160


@pytest.mark.long
def test_script_makes_the_committed_files_again(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "make_mini_dataset.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    for name in ROWS:
        made, committed = tmp_path / f"{name}.parquet", MINI / f"{name}.parquet"
        assert pq.read_table(made).equals(pq.read_table(committed))
        if pq.read_metadata(made).created_by == pq.read_metadata(committed).created_by:  # the same pyarrow
            assert made.read_bytes() == committed.read_bytes()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "tokenizer" / name).read_text() == (MINI / "tokenizer" / name).read_text()


def test_the_tokenizer_is_the_same_beside_a_qwen2_model(splits, tmp_path):
    """There transformers builds Qwen2's own cutting around our merges; other tokens would come without a word."""
    from transformers import AutoTokenizer, Qwen2Config

    shutil.copytree(MINI / "tokenizer", tmp_path, dirs_exist_ok=True)
    alone = AutoTokenizer.from_pretrained(MINI / "tokenizer")
    Qwen2Config().save_pretrained(tmp_path)
    beside = AutoTokenizer.from_pretrained(tmp_path)
    assert type(alone) is not type(beside)
    for row in splits["test"]:
        messages = row["prompt"]
        rendered = [each.apply_chat_template(messages, add_generation_prompt=True) for each in (alone, beside)]
        assert rendered[0]["input_ids"] == rendered[1]["input_ids"]
        text = chat_text(row)
        assert alone(text).input_ids == beside(text).input_ids
        assert beside.decode(beside(text).input_ids) == text
