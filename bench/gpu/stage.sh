#!/usr/bin/env bash
# Packs what a GPU machine without a package index lacks, as pieces that can be copied one by one:
#   bash bench/gpu/stage.sh [FOLDER=outputs/stage]
# The machine is assumed to have Python 3.12, CUDA 13, torch 2.11, triton 3.6, transformers 5.17 or later, accelerate,
# numpy, pandas, pyarrow, safetensors, tensorboard and pytest. Code that a dense model on Hopper never loads is left out
# of vLLM and Ray. Wheels stay in FOLDER/wheels, so that an interrupted call goes on where it was.
# PIECE: size of a piece, default 52m. PYTHON: the interpreter, whose pip downloads.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

out="$(realpath -m "${1:-outputs/stage}")"
python="${PYTHON:-python}"
tree="$out/site"
platforms=(--python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none)
for glibc in 35 34 31 28 27 26 24 17 12 5; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform any)

# What vLLM's engine imports. Its own pin of apache-tvm-ffi breaks this xgrammar.
packages=(vllm==0.24.0 pydantic==2.14.3 pydantic-core==2.50.4 annotated-types==0.8.0 typing-inspection==0.4.5
    cachetools==8.0.0 cbor2==6.2.1 msgspec==0.22.0 pyzmq==27.3.0 openai==2.54.0 jiter==0.19.0 distro==1.9.0
    sniffio==1.3.1 openai-harmony==0.0.8 fastapi==0.136.3 starlette==1.10.0 partial-json-parser==0.2.1.1.post7
    pybase64==1.5.1 llguidance==1.7.6 xgrammar==0.2.8 apache-tvm-ffi==0.1.15.post2 setproctitle==1.3.8 blake3==1.0.11
    compressed-tensors==0.17.0 loguru==0.7.3 depyf==0.20.0 astor==0.8.1 dill==0.4.1 uvicorn==0.54.0 uvloop==0.23.0
    prometheus-client==0.26.0 einops==0.8.2 numba==0.65.0 llvmlite==0.47.0 requests==2.34.2 urllib3==2.8.0
    certifi==2026.10.19.post1 charset-normalizer==3.5.3 idna==3.20 aiohttp==3.14.5 aiohappyeyeballs==2.7.1
    aiosignal==1.4.0 frozenlist==1.8.0 multidict==7.2.1 propcache==0.5.4 yarl==1.25.1 attrs==26.1.0 py-cpuinfo==9.0.0)
# What the trainer and its tests import, and what the benchmarks compare with.
packages+=(ray==2.60.0 msgpack==1.2.4 hydra-core==1.3.8 omegaconf==2.3.1 jsonschema==4.26.0 referencing==0.37.0 rpds-py==2026.9.1
    jsonschema-specifications==2025.9.1 docstring-parser==0.18.0 cloudpickle==3.1.2 rich==15.0.0 markdown-it-py==4.3.0
    mdurl==0.1.2 pygments==2.21.0 scipy==1.17.1 math-verify==0.9.0 latex2sympy2-extended==1.11.0 psutil==7.2.2
    hypothesis==6.170.15 sortedcontainers==2.4.0 liger-kernel==0.8.5 datasets==5.2.0 multiprocess==0.70.19
    xxhash==4.1.0 trl==1.16.0)

mkdir -p "$out/wheels"
"$python" -m pip download --quiet --no-deps --only-binary=:all: "${platforms[@]}" --find-links "$out/wheels" \
    --dest "$out/wheels" "${packages[@]}"
# Published as source only, and pure Python.
compgen -G "$out/wheels/antlr4_*" >/dev/null ||
    "$python" -m pip wheel --quiet --no-deps --wheel-dir "$out/wheels" antlr4-python3-runtime==4.9.3

rm -rf "$tree" "$out"/site.p* "$out/SUMS"
mkdir -p "$tree"
for wheel in "$out"/wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$tree"; done
chmod +x "$tree"/ray/core/src/ray/*/*
rm -rf "$tree"/ray/{jars,rllib,dashboard/client}
vllm="$tree/vllm"  # FA2 is code for sm_80; the rest is for experts, FP4, MLA, Blackwell and the front end in Rust
rm -rf "$vllm"/vllm_flash_attn/_vllm_fa2_C.abi3.so "$vllm"/{_moe_C_stable_libtorch,_qutlass_C}.abi3.so \
    "$vllm"/_flashmla*.so "$vllm/vllm-rs" "$vllm"/third_party/{deep_gemm,fmha_sm100}

tar -C "$tree" --sort=name --mtime=@0 -cf - . | xz -6 -T0 | split --bytes "${PIECE:-52m}" --numeric-suffixes - "$out/site.p"
(cd "$out" && sha256sum -- site.p* >SUMS)
du -sh "$tree" "$out"/site.p*
cat <<TEXT
Copy $out/SUMS and each site.p* to a folder of that machine, one at a time if need be. There, in this folder:
  sha256sum -c --quiet SUMS && mkdir -p ~/site && cat site.p* | xz -dc -T0 | tar -xf - -C ~/site
  export PYTHONPATH=~/site VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1
  bash bench/gpu/first_hour.sh
TEXT
