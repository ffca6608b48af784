#!/usr/bin/env bash
# SmolLM2-135M-Instruct learns to call APIs from published rows, by GRPO or by more SFT, on two CPU cores.
#
#   bash scripts/learn_calls.sh [ARM] [FOLD] [key=value ...]
#
# ARM is grpo (default), sft or start; FOLD is 0 (default), 1 or 2: the APIs that are held out, and the seed. Overrides
# go to the training of the arm. All arms of a fold begin with one short SFT. scripts/get_calls_data.py fetches the rows.
# An interrupted run goes on where it was. Variables:
#   OUT (outputs/learn_calls_FOLD)  folder of all outputs
#   NAME (ARM)                      of the arm's folder in it; another one for other overrides
#   CALLS_DATA (dataset/calls)      folder of the published rows
#   STEPS (40)                      of GRPO; the arm sft takes twice as many, which is about as many CPU seconds
#   DTYPE (bfloat16)                float32 for a CPU without instructions for bfloat16, which the trainer warns of
#   SAMPLES (4)                     per held-out row at temperature 1, beside the greedy answer; 0 for none
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stage() { echo "learn_calls [$((SECONDS / 60)) min] $*"; }

fail() {
    echo "learn_calls: $*" >&2
    exit 2
}

main() {
    local arm=grpo fold=0
    if [[ -n "${1:-}" && "$1" != *=* && ! "$1" =~ ^[0-9]+$ ]]; then
        arm="$1"
        shift
    fi
    if [[ "${1:-}" =~ ^[0-9]+$ ]]; then
        fold="$1"
        shift
    fi
    [[ "$arm" =~ ^(grpo|sft|start)$ ]] || fail "expected the arm grpo, sft or start, got '$arm'"
    [[ "$fold" =~ ^[012]$ ]] || fail "expected the fold 0, 1 or 2, got '$fold'"
    local steps="${STEPS:-40}" rows="${CALLS_DATA:-dataset/calls}" out="${OUT:-outputs/learn_calls_$fold}"
    local name="${NAME:-$arm}" samples="${SAMPLES:-4}" start model
    [[ "$steps" =~ ^[1-9][0-9]*$ ]] || fail "expected STEPS of 1 or more, got '$steps'"
    [[ "${DTYPE:-bfloat16}" =~ ^(bfloat16|float32)$ ]] || fail "expected the DTYPE bfloat16 or float32, got '$DTYPE'"
    [[ "$samples" =~ ^[0-9]+$ ]] || fail "expected SAMPLES of 0 or more, got '$samples'"
    [[ -e "$rows/glaive_toolcall_en.json" ]] || fail "no rows in $rows; fetch them with scripts/get_calls_data.py"
    source scripts/setup_env.sh
    local chat=(data.prompt_template=hermes_tools env.tool_call_format=hermes data.max_prompt_length=400)
    chat+=(data.max_response_length=96 data.split_turns=last model.compute_dtype="${DTYPE:-bfloat16}")
    local sft=("${chat[@]}" data.train_batch_size=16 trainer.seed="$fold" trainer.default_local_dir="$out")

    stage "1/5 model"
    "$VERL_PYTHON" scripts/prepare_smollm2.py --out models/smollm2
    stage "2/5 rows in $out/data"
    "$VERL_PYTHON" scripts/learn_calls/make_data.py --input "$rows"/*.json --tokenizer models/smollm2 \
        --out "$out/data" --fold "$fold"
    stage "3/5 SFT on the demonstrations"
    start="$out/start/checkpoints/step-000008/hf"
    if [[ ! -e "$start" ]]; then
        "$VERL_PYTHON" -m verl.trainer.main_sft "${sft[@]}" model.path=models/smollm2 \
            data.train_files=["$out/data/demonstrations.jsonl"] trainer.experiment_name=start \
            actor.optim.lr=2e-4 actor.optim.schedule=cosine actor.optim.warmup_steps=1 trainer.total_training_steps=8
    fi
    stage "4/5 $name"
    case "$arm" in
        grpo)
            "$VERL_PYTHON" -m verl.trainer.main_ppo recipe=learn_calls model.path="$start" "${chat[@]}" \
                data.train_files=["$out/data/train.jsonl"] trainer.total_training_steps="$steps" \
                trainer.seed="$fold" trainer.default_local_dir="$out" trainer.experiment_name="$name" "$@"
            printf -v model '%s/checkpoints/step-%06d/hf' "$out/$name" "$steps"
            ;;
        sft)
            "$VERL_PYTHON" -m verl.trainer.main_sft "${sft[@]}" model.path="$start" \
                data.train_files=["$out/data/all.jsonl"] trainer.experiment_name="$name" \
                actor.optim.lr=5e-5 actor.optim.schedule=cosine actor.optim.warmup_steps=3 \
                trainer.total_training_steps="$((2 * steps))" "$@"
            printf -v model '%s/checkpoints/step-%06d/hf' "$out/$name" "$((2 * steps))"
            ;;
        start) model="$start" ;;
    esac
    stage "5/5 held-out rows"
    local evaluation=("${chat[@]}" model.path="$model" eval.handler=hermes eval.output="$out/eval")
    evaluation+=(eval.benchmarks=["$out/data/held_out.jsonl"])
    [[ "$arm" == start ]] || evaluation+=(eval.compare="$start")
    "$VERL_PYTHON" -m toolrl eval "${evaluation[@]}"
    ((samples == 0)) || "$VERL_PYTHON" -m toolrl eval "${evaluation[@]}" rollout.n="$samples" rollout.temperature=1
}

main "$@"
