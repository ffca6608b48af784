#!/usr/bin/env bash
# SmolLM2-135M-Instruct discovers a calculator from right answers alone, on two CPU cores.
#
#   bash scripts/learn_tool.sh [SEED] [key=value ...]     default seed 0; overrides of the training configuration
#
# The model (scripts/prepare_smollm2.py), the questions, a short SFT on 40 poor demonstrations, GRPO, and the same 100
# unseen questions before and after it. An interrupted run goes on where it was; a finished one shows its result again.
# Further variables:
#   OUT                             folder of all outputs (outputs/learn_tool_SEED, and those of the others that are set)
#   PLAIN (0)                       share of questions that need no tool
#   STEPS (1)                       2, 3: questions of two to that many operations; the calculator does one a call
#   CALLS (1; 4 if STEPS > 1)       calls of an episode, at most
#   DTYPE (bfloat16)                float32 for a CPU without instructions for bfloat16, which the trainer warns of
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stage() { echo "learn_tool [$((SECONDS / 60)) min] $*"; }

main() {
    local seed=0
    if [[ "${1:-}" =~ ^[0-9]+$ ]]; then
        seed="$1"
        shift
    elif [[ -n "${1:-}" && "$1" != *=* ]]; then
        echo "learn_tool: expected a seed (a whole number) or key=value, got '$1'" >&2
        exit 2
    fi
    local steps="${STEPS:-1}" calls="${CALLS:-}" room=120 tool=calculator pack=16384
    if [[ ! "$steps" =~ ^[123]$ || ! "$calls" =~ ^[0-9]*$ ]]; then
        echo "learn_tool: expected STEPS of 1 to 3 and a whole number of CALLS, got '$steps' and '$calls'" >&2
        exit 2
    fi
    local dtype="${DTYPE:-bfloat16}"
    if [[ ! "$dtype" =~ ^(bfloat16|float32)$ ]]; then
        echo "learn_tool: expected the DTYPE bfloat16 or float32, got '$dtype'" >&2
        exit 2
    fi
    local out="${OUT:-outputs/learn_tool_$seed${PLAIN:+_plain_$PLAIN}${STEPS:+_steps_$STEPS}${CALLS:+_calls_$CALLS}}"
    if [[ -e "$out/result.json" && $# -eq 0 ]]; then
        stage "seed $seed is done; to repeat it, remove $out"
        cat "$out/result.md"
        return
    fi
    calls="${calls:-$((steps > 1 ? 4 : 1))}"
    if ((steps > 1)); then
        room=240 tool=scripts/learn_tool/one_operation.py:one_operation
        pack=4096  # all episodes in one take too much memory
    fi
    source scripts/setup_env.sh
    stage "1/5 model"
    "$VERL_PYTHON" scripts/prepare_smollm2.py --out models/smollm2
    stage "2/5 questions in $out/data"
    "$VERL_PYTHON" scripts/learn_tool/make_data.py --out "$out/data" --seed "$seed" --plain "${PLAIN:-0}" --steps "$steps"
    stage "3/5 SFT on 40 demonstrations"
    local start="$out/sft/checkpoints/step-000016"
    if [[ ! -e "$start" ]]; then
        "$VERL_PYTHON" -m verl.trainer.main_sft \
            model.path=models/smollm2 model.compute_dtype="$dtype" data.prompt_template=hermes_tools env.tool_call_format=hermes \
            data.train_files=["$out/data/demonstrations.jsonl"] data.train_batch_size=10 \
            data.max_prompt_length=400 data.max_response_length="$room" \
            actor.optim.lr=1e-4 actor.optim.warmup_steps=2 trainer.total_training_steps=16 trainer.seed="$seed" \
            trainer.default_local_dir="$out" trainer.experiment_name=sft
    fi
    stage "4/5 GRPO, reward 1 for the right number"
    "$VERL_PYTHON" -m verl.trainer.main_ppo recipe=learn_tool model.path="$start/hf" model.compute_dtype="$dtype" \
        data.train_files=["$out/data/train.jsonl"] data.val_files=["$out/data/test.jsonl"] \
        data.max_response_length="$room" env.tools=["$tool"] env.max_tool_calls="$calls" \
        actor.max_tokens_per_pack="$pack" trainer.seed="$seed" \
        trainer.default_local_dir="$out" "$@"
    stage "5/5 result in $out"
    "$VERL_PYTHON" scripts/learn_tool/report.py "$out"
}

main "$@"
