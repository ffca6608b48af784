# Shared by train_grpo.sh and train_ppo.sh; source it from the repository's root.

source scripts/setup_env.sh

# Trains with the recipe for algorithm $1; further arguments override the configuration.
train() {
    local algorithm="$1" overrides
    shift
    if [[ -z "${BASE_MODEL:-}" ]]; then
        if [[ -n "${DATA_DIR:-}" ]]; then
            echo "DATA_DIR is set but BASE_MODEL is not: the embedded model fits only the embedded tasks. Set BASE_MODEL." >&2
            exit 2
        fi
        overrides=("recipe=composed_$algorithm")
    else
        overrides=("recipe=toolrl_$algorithm" "model.path=$(model_path)")
        overrides+=("data.train_files=[$(data_file train)]" "data.val_files=[$(data_file test)]")
        overrides+=("trainer.nnodes=${NNODES:-1}" "trainer.n_gpus_per_node=${N_GPUS:-$(num_gpus)}")
        overrides+=("rollout.tensor_model_parallel_size=${ROLLOUT_TP_SIZE:-1}")
    fi
    if [[ -n "${EXPERIMENT_NAME:-}" ]]; then
        overrides+=("trainer.experiment_name=$EXPERIMENT_NAME")
    fi
    exec "$VERL_PYTHON" -m verl.trainer.main_ppo "${overrides[@]}" "$@"
}

# The folder or hub name that BASE_MODEL stands for.
model_path() {
    if [[ "$BASE_MODEL" == smollm2 ]]; then
        "$VERL_PYTHON" scripts/prepare_smollm2.py --out models/smollm2 >&2 || exit 1
        echo models/smollm2
    else
        echo "$BASE_MODEL"
    fi
}

# File $1.parquet of DATA_DIR; the trainer checks that it exists.
data_file() {
    echo "${DATA_DIR:-dataset/rlla_4k}/$1.parquet"
}

# Number of GPUs of this machine; 1 if there is none.
num_gpus() {
    local count=0
    if command -v nvidia-smi > /dev/null; then
        count=$(nvidia-smi --list-gpus 2> /dev/null | grep -c '^GPU ' || true)
    fi
    echo "$((count > 0 ? count : 1))"
}
