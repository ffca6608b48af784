#!/usr/bin/env bash
# What one hour on a GPU is spent on, in pieces of at most ten minutes with a JSON file each:
#   bash bench/gpu/first_hour.sh stage [FOLDER]   with internet: packages for a machine without (bench/gpu/stage.sh)
#   bash bench/gpu/first_hour.sh [PIECE ...]      the pieces that have no result yet, or these
#   bash bench/gpu/first_hour.sh rehearse         all of them on a CPU with tiny sizes, into OUT/rehearsal
#   bash bench/gpu/first_hour.sh table            the results into docs/benchmarks.md
# OUT: folder of the results, default outputs/first_hour. MODEL: a model folder for drafts and canary; default: random.
# PYTHON: the interpreter. A piece that fails or runs out of time has no result, and is tried again by the next call.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python="${PYTHON:-python}"
out="${OUT:-outputs/first_hour}"
here=bench/gpu
rehearse=()
pieces=(tests kernels decode pack drafts canary step-0.5B step-1.5B ours-64 trl-64)
export PYTHONPATH="$PWD:$PWD/bench${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

run() {  # PIECE: what it measures
    case "$1" in
        tests) piece gpu_tests.py ;;                                       # everything marked gpu
        kernels) piece exactness.py ;;                                       # attention and loss beside float64
        decode) piece decode.py --size 1.5B ;;                             # seeds, sleep, wake-up, weight sync
        pack) piece pack.py --size 1.5B ;;                                 # kernel classes beside the count; offload
        drafts) piece drafts.py --size 1.5B ${MODEL:+--model "$MODEL"} ;;  # prompt lookup: accepted, log-probs
        canary) piece train_step.py --size 1.5B --prompts 64 ${MODEL:+--model "$MODEL"} ;;
        step-0.5B) piece train_step.py --size 0.5B --prompts 512 ;;        # phases, MFU, memory beside the plan
        step-1.5B) piece train_step.py --size 1.5B --prompts 512 ;;
        ours-64) piece train_step.py --size 1.5B --prompts 64 ;;           # beside the next
        trl-64) piece trl_step.py --size 1.5B --prompts 64 ;;
    esac
}

piece() {  # SCRIPT ARGUMENT..
    timeout --kill-after=10 580 "$python" "$here/$1" --name "$name" --out "$out" "${@:2}" "${rehearse[@]}"
}

case "${1:-}" in
    stage) shift; exec bash "$here/stage.sh" "$@" ;;
    table) exec "$python" "$here/table.py" "$out" ;;
    rehearse) shift; rehearse=(--rehearse) ;;
esac

chosen=("$@")
(($#)) || chosen=("${pieces[@]}")
for name in "${chosen[@]}"; do
    if [[ " ${pieces[*]} " != *" $name "* ]]; then
        echo "unknown piece $name; choose from: ${pieces[*]}" >&2
        exit 2
    fi
done
alone=" kernels pack "  # need neither vLLM nor Ray
for name in "${chosen[@]}"; do [[ "$alone" == *" $name "* ]] || engines=true; done
if ((${#rehearse[@]} == 0)) && [[ -n "${engines:-}" ]]; then  # against pieces that all end with the same missing package
    "$python" -c "import vllm.v1.engine.async_llm, vllm.v1.worker.gpu_worker, ray, pytest, pandas, tensorboard" || {
        echo "a package is missing or broken; bash $here/first_hour.sh stage packs all of them, and" \
            "bash $here/first_hour.sh kernels pack runs without vLLM and Ray" >&2
        exit 2
    }
fi
results="$out${rehearse:+/rehearsal}"
missing=()
for name in "${chosen[@]}"; do
    if (($# == 0)) && [[ -e "$results/$name.json" ]]; then continue; fi
    echo "== $name"
    run "$name"
    code=$?
    case $code in
        0) echo "== $name: done in $SECONDS s since the start, $results/$name.json" ;;
        124 | 137) echo "== $name: not finished within 580 s"; missing+=("$name") ;;
        *) echo "== $name: exit code $code"; missing+=("$name") ;;
    esac
done
if ((${#missing[@]})); then
    echo "without a result: ${missing[*]}"
    exit 1
fi
echo "all have a result; bash $here/first_hour.sh table writes docs/benchmarks.md"
