#!/usr/bin/env bash
# Measures every row of the scoreboard and writes the table of docs/benchmarks.md:
#     bash bench/run_all.sh [ROUNDS]
# ROUNDS measured rounds per side, default 3. MODEL and DATA override the paths of SmolLM2 and ToolRL's test rows,
# PYTHON the interpreter. Rows with missing requirements are skipped; failures are listed at the end. One thread each;
# takes about an hour and a half on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."

rounds="${1:-3}"
[[ "$rounds" =~ ^[1-9][0-9]*$ ]] || { echo "ROUNDS must be a positive number, got '$rounds'" >&2; exit 2; }
python="${PYTHON:-python}"
model=(--model "${MODEL:-models/smollm2}")
data=(--data "${DATA:-dataset/rlla_4k/test.parquet}")
out="outputs/bench"
lines="$out/results.jsonl"
failed=()
export OMP_NUM_THREADS=1

measure() {  # SCRIPT ARGUMENT...
    echo "== $*" >&2
    "$python" "bench/$1" --rounds "$rounds" "${@:2}" >>"$lines" || failed+=("$*")
}

mkdir -p "$out"
measure step.py --rollout hf "${model[@]}" "${data[@]}"
measure step.py --rollout vllm "${model[@]}" "${data[@]}"
measure step.py --rollout vllm --n 8 --prompts 1 "${model[@]}" "${data[@]}"
measure step.py --rollout vllm --prompt-text user --n 8 --prompts 1 --response 200 "${model[@]}" "${data[@]}"
measure step.py --rollout vllm --trl-head all "${model[@]}" "${data[@]}"
measure shared_prompt.py "${model[@]}"
measure padding.py "${model[@]}" "${data[@]}"
measure loss_memory.py
measure rollout.py
measure rollout.py --eager
measure weight_sync.py
measure async_tools.py
measure async_tools.py --loop batches
measure async_tools.py --loop serial --episodes 64
measure controller.py
measure controller_scale.py
measure pipeline.py
measure reward.py
measure plan_memory.py
measure sandbox.py
measure eval_throughput.py
measure swe_pipeline.py
measure gateway.py "${model[@]}"
for runs in outputs/convergence/*/; do  # from bench/convergence.sh, which takes an hour and is not run here
    [[ ! -d "$runs" ]] || measure convergence.py "$runs"
done
"$python" bench/results.py "$lines" || failed+=("results.py $lines")

if ((${#failed[@]})); then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
