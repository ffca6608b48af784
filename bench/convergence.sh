#!/usr/bin/env bash
# Does training converge as well with stale samples? Reward by step and time for several rollout.max_staleness:
#
#   bash bench/convergence.sh [composed|tool_loop]...     default: both
#
# composed is `bash train_grpo.sh` on the tools it shows, tool_loop the training of scripts/train_tool_loop.sh, where all runs of a seed share a
# cold start. Each run has its own folder below OUT, and bench/convergence.py evaluates them at the end. Finished runs
# are skipped, so that a second call resumes an interrupted study. Settings, all optional:
#   STEPS (30)                    training steps per run; another number needs another OUT
#   STALENESS ("0 1 4")           values of rollout.max_staleness
#   SEEDS ("0 1 2")               seeds per value
#   PAIR_SEEDS ("3 4")            further seeds of composed for 0 and 1, for the paired comparison
#   OUT (outputs/convergence)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh

steps="${STEPS:-30}" out="${OUT:-outputs/convergence}"
read -ra staleness <<<"${STALENESS:-0 1 4}"
read -ra seeds <<<"${SEEDS:-0 1 2}"
read -ra pair_seeds <<<"${PAIR_SEEDS-3 4}"
experiments=("$@")
((${#experiments[@]})) || experiments=(composed tool_loop)
failed=()

composed() {  # SEED STALENESS
    run composed "$@" recipe=composed_grpo data.val_files=[embedded:composed/test.parquet]
}

tool_loop() {  # SEED STALENESS
    local start="$out/tool_loop/start_seed$1"
    mkdir -p "$start"
    bash scripts/tool_loop/cold_start.sh "$start" "$1" >"$start/log" 2>&1 || { failed+=("$start/log"); return; }
    run tool_loop "$@" recipe=tool_loop model.path="$start/cold_start/checkpoints/step-000400/hf" \
        data.train_files=["$start/data/train.jsonl"] data.val_files=["$start/data/test.jsonl"]
}

run() {  # EXPERIMENT SEED STALENESS OVERRIDE...
    local folder="$out/$1" name="k$3_seed$2"
    if [[ -e "$folder/$name/done" ]]; then
        return
    fi
    rm -rf "${folder:?}/$name"  # left by an interruption
    mkdir -p "$folder"
    echo "$(date +%T) $1, seed $2, rollout.max_staleness=$3" >&2
    if "$VERL_PYTHON" -m verl.trainer.main_ppo "${@:4}" \
        rollout.max_staleness="$3" trainer.seed="$2" \
        trainer.total_training_steps="$steps" trainer.test_freq=5 trainer.save_freq=0 \
        trainer.default_local_dir="$folder" trainer.experiment_name="$name" >"$folder/$name.log" 2>&1; then
        touch "$folder/$name/done"
    else
        failed+=("$folder/$name.log")
    fi
}

for experiment in "${experiments[@]}"; do
    [[ "$experiment" == composed || "$experiment" == tool_loop ]] || { echo "composed or tool_loop, got '$experiment'" >&2; exit 2; }
    for seed in "${seeds[@]}"; do
        for k in "${staleness[@]}"; do "$experiment" "$seed" "$k"; done
    done
done
if [[ " ${experiments[*]} " == *" composed "* ]]; then
    for seed in "${pair_seeds[@]}"; do
        for k in 0 1; do composed "$seed" "$k"; done
    done
fi
for experiment in "${experiments[@]}"; do
    "$VERL_PYTHON" bench/convergence.py "$out/$experiment" || failed+=("bench/convergence.py $out/$experiment")
done

if ((${#failed[@]})); then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
