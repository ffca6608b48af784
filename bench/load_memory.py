"""Host memory by which each rank grows while it loads a model: as a whole, which is then sharded, or by its shards.

    python bench/load_memory.py [--layers 16] [--ranks 4] [--folder FOLDER]

Writes a random model of 16-bit weights (16 layers: 0.96 billion parameters), then loads it on CPU ranks into float32
masters, in both ways. Growth is that of the peak resident memory, mapped pages of files included. Ranks that load a
whole model do so one after another, so that the machine needs memory for one of them. The last column is the growth
while the ranks export the model again.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, Qwen2Config

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from verl.units import MIB
from verl.weight_files import WeightFiles
from verl.workers.export import start_export
from verl.workers.fsdp_engine import FSDPEngine
from verl.workers.model import PackedPolicy, decoder_layers, load_causal_lm
from verl.workers.optim import OptimizerSettings

TOKENIZER = str(ROOT / "dataset" / "mini" / "tokenizer")


def write_model(folder: Path, layers: int, vocabulary: int = 32_768) -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16}
    config = Qwen2Config(vocab_size=vocabulary, num_hidden_layers=layers, tie_word_embeddings=False, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for each in model.parameters():
            each.normal_(std=0.02)
    model.save_pretrained(folder, max_shard_size="500MB")


def resident(field: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at most since `start_peak`."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def start_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def load(model: Path, by_shards: bool, world: int) -> FSDPEngine:
    loaded = load_causal_lm(str(model), empty=by_shards)
    weights = WeightFiles(str(model), loaded) if by_shards else None
    policy, mesh = PackedPolicy(loaded), init_device_mesh("cpu", (world,))
    return FSDPEngine(policy, decoder_layers(policy), mesh, OptimizerSettings(), torch.bfloat16, weights=weights)


def run_rank(rank: int, world: int, folder: Path, by_shards: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{by_shards}", rank=rank, world_size=world)
    init_device_mesh("cpu", (world,))
    load(folder / "tiny", by_shards, world)  # imports and buffers of the libraries are no growth
    for turn in range(world):
        if by_shards or turn == rank:
            before = start_peak()
            engine = load(folder / "model", by_shards, world)
            growth = resident("VmHWM") - before
        dist.barrier()
        if by_shards:
            break
    before = start_peak()
    if by_shards:
        start_export(engine, folder / "exported", TOKENIZER).write()
    exported = resident("VmHWM") - before
    sizes = [each.numel() * each.element_size() for each in engine.module.parameters()]
    figures = growth, engine.param_bytes, max(sizes), sum(sizes), exported
    gathered: list[tuple[int, ...]] = [()] * world
    dist.all_gather_object(gathered, figures)
    if rank == 0:
        way = "by shards" if by_shards else "as a whole"
        for number, (grown, shard, largest, whole, export) in enumerate(gathered):
            columns = [grown, shard, shard + largest, whole, export if by_shards else None]
            shown = ["-" if each is None else f"{each / MIB:,.0f}" for each in columns]
            print(f"| {way} | {number} | " + " | ".join(shown) + " |", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        write_model(Path(name, "tiny"), 1, 256)
        write_model(Path(name, "model"), arguments.layers)
        print("| loaded | rank | growth, MiB | shard | shard + largest tensor | all weights | growth of an export |")
        print("|---|---|---|---|---|---|---|", flush=True)
        for by_shards in (True, False):
            mp.spawn(run_rank, (arguments.ranks, Path(name), by_shards), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
