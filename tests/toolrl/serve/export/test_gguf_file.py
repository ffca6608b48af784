"""GGUF files, read back by transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from toolrl.cli import main as toolrl
from verl.embedded import embedded_path

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")  # with which transformers reads GGUF
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 1024, "bos_token_id": None}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-6}
EMBEDDED = Path(embedded_path("embedded:model"))


def family(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    match name:
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, rope_theta=20000.0))
        case "llama_tied":
            return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True))
        case "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**SIZES, **HEADS))
            for layer in model.model.layers:
                torch.nn.init.normal_(layer.self_attn.q_proj.bias)
            return model
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, head_dim=128))
    raise AssertionError(name)


def saved(model: PreTrainedModel, folder: Path) -> Path:
    """The model with the embedded tokenizer."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(EMBEDDED / name, folder)
    return folder


def exported(folder: Path, out: Path, *options: str) -> str:
    with pytest.raises(SystemExit) as ended:
        toolrl(["export", str(folder), "--format", "gguf", "--out", str(out), *options])
    assert ended.value.code == 0
    (path,) = out.iterdir()
    return path.name


def round_matrices(model: PreTrainedModel, dtype: str) -> None:
    """To the values that the file can hold."""
    kind = gguf.GGMLQuantizationType[dtype.upper()]
    for weight in model.parameters():
        if weight.ndim > 1:
            stored = gguf.quants.quantize(weight.detach().numpy(), kind)
            weight.data = torch.from_numpy(gguf.quants.dequantize(stored, kind)).clone()


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen2", "qwen3"])
@pytest.mark.filterwarnings("ignore")
def test_the_file_is_the_model(name: str, dtype: str, tmp_path: Path) -> None:
    """But for the rounding of its matrices, which alone changes the logits by less than 5 %."""
    model = family(name).eval()
    folder = saved(model, tmp_path / "model")
    file = exported(folder, tmp_path / "out", "--dtype", dtype)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file=file, dtype=torch.float32).eval()
    assert type(loaded) is type(model)
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        exact, found = model(ids).logits, loaded(ids).logits
        round_matrices(model, dtype)
        rounded = model(ids).logits
    assert (rounded - found).abs().max() < 1e-3 and (exact - found).abs().max() < 0.05
    asked = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    assert model.generate(ids, **asked).tolist() == loaded.generate(ids, **asked).tolist()


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
@pytest.mark.filterwarnings("ignore")
def test_the_embedded_policy_answers_with_the_same_tokens(dtype: str, tmp_path: Path) -> None:
    file = exported(EMBEDDED, tmp_path / "out", "--dtype", dtype)
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file=file, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    messages = [{"role": "user", "content": "**Dialogue Records History**\n<user> Rain in Kala? </user>"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    answers = [each.generate(ids, max_new_tokens=40, do_sample=False).tolist() for each in (model, loaded)]
    assert answers[0] == answers[1]


@pytest.mark.filterwarnings("ignore")
def test_the_tokenizer_is_in_the_file(tmp_path: Path) -> None:
    """Without the embedded tokenizer's tokens that contain spaces, which transformers does not read from GGUF."""
    folder = saved(family("qwen2"), tmp_path / "model")
    described = json.loads((folder / "tokenizer.json").read_text())
    for token in described["added_tokens"]:
        if " " in token["content"] or "\n" in token["content"]:
            token["content"] = f"<|plain_{token['id']}|>"
    (folder / "tokenizer.json").write_text(json.dumps(described))
    file = exported(folder, tmp_path / "out")
    tokenizer, loaded = (
        AutoTokenizer.from_pretrained(folder),
        AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file=file),
    )
    for text in (
        "Rain in Kala, 27 times?",
        "<think> é😀 </think>\n<tool_call>\n{}",
        "<|im_start|>user\n  a  b<|im_end|>",
    ):
        assert (
            loaded(text, add_special_tokens=False)["input_ids"]
            == tokenizer(text, add_special_tokens=False)["input_ids"]
        )
    assert loaded.eos_token_id == tokenizer.eos_token_id
    assert loaded.chat_template.strip() == tokenizer.chat_template.strip()


@pytest.mark.filterwarnings("ignore")
def test_other_families_and_existing_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=1024)), tmp_path / "model")
    with pytest.raises(SystemExit) as ended:
        toolrl(["export", str(folder), "--format", "gguf", "--out", str(tmp_path / "out")])
    assert ended.value.code == 2
    assert "models of type 'gpt2' are not known; known: llama, qwen2, qwen3" in capsys.readouterr().err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model"]  # nothing half-written
    with pytest.raises(SystemExit) as ended:
        toolrl(["export", str(EMBEDDED), "--format", "gguf", "--out", str(folder)])
    assert ended.value.code == 2
    assert "exists already. Choose another --out" in capsys.readouterr().err
