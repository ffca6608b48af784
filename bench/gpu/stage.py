"""Packs what a GPU machine without a package index lacks, as archives that can be brought one by one.

    python bench/gpu/stage.py [--out FOLDER]    wheels into FOLDER/wheels; archives and their SUMS into FOLDER

The machine is assumed to have Python 3.12, CUDA 13 and the packages of image.txt. The archives hold vLLM and what
packages.txt names, without the files of LEFT_OUT and without device code for other cards than Hopper's (--no-blank
keeps it; a library that lacks it has not run on a card yet). Each is a folder for PYTHONPATH, and packages.tar.xz alone
is enough to train without vLLM. Wheels stay, so that an interrupted call continues; the same wheels give the same
archives. At its end it prints the calls that bring them to the machine.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import lzma
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.gpu.fatbin import blank
from verl.host.files import replacing

MIB = 2**20
SUMS = "SUMS"
HOPPER = 90  # compute capability 9.0
GLIBC = (35, 34, 31, 28, 27, 26, 24, 17, 12, 5)  # minor versions in the names of wheels; pip matches them one by one
PACKAGES = Path(__file__).with_name("packages.txt")
VLLM = ["vllm==0.24.0"]
SOURCE = ["antlr4-python3-runtime==4.9.3"]  # published as source only, and pure Python
LEFT_OUT = (  # paths in the wheels that a dense model on Hopper never reads
    "*.data/*",  # commands
    "ray/jars/*",  # Java
    "ray/rllib/*",
    "ray/dashboard/client/*",  # the page
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",  # Hopper has FlashAttention 3
    "vllm/_moe_C_stable_libtorch.abi3.so",  # experts
    "vllm/model_executor/layers/fused_moe/configs/*",
    "vllm/_flashmla*.so",  # latent attention
    "vllm/_qutlass_C.abi3.so",  # FP4
    "vllm/third_party/fmha_sm100/*",  # Blackwell
    "vllm/third_party/deep_gemm/*",  # FP8
    "vllm/vllm-rs",  # the front end in Rust
)
DEVICE_CODE = "vllm/_C_stable_libtorch.abi3.so"  # for seven architectures; FlashAttention 3 is for Hopper alone
# Branches of x86 code are rewritten first. The dictionary reaches over the similar kernels of a whole library, and
# device code has instructions of 16 bytes: 4 position bits. That is enough for the fastest preset to meet the limits.
FILTERS: list[Mapping[str, int]] = [
    {"id": lzma.FILTER_X86},
    {"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": 128 * MIB, "lc": 2, "lp": 2, "pb": 4},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/stage", metavar="FOLDER")
    parser.add_argument("--no-ray", action="store_true", help="for measurements in one process")
    parser.add_argument("--no-blank", action="store_true", help="keep device code for other cards")
    parser.add_argument("--piece-mib", type=float, default=50, help="the limit of an archive; default 50")
    parser.add_argument("--call-mib", type=float, default=64, help="the limit of a call with repository; default 64")
    options = parser.parse_args()

    packages = [pin for pin in read_pins(PACKAGES) if not (options.no_ray and pin.startswith("ray=="))]
    wheels = options.out / "wheels"
    fetch([*VLLM, *packages], wheels)
    (options.out / SUMS).unlink(missing_ok=True)
    archives = []
    for name, pins in {"packages": packages, "vllm": VLLM}.items():
        archives.append(path := options.out / f"{name}.tar.xz")
        found = [wheel for pin in pins for wheel in find_wheel(wheels, pin)]
        count, size = pack(path, found, None if options.no_blank else HOPPER)
        print(f"{path.name}: {mib([path]):.1f} MiB; unpacked {size / MIB:.0f} MiB in {count:,} files", flush=True)
        if mib([path]) > options.piece_mib:
            raise SystemExit(f"{path.name} is larger than {options.piece_mib} MiB")
    with replacing(options.out / SUMS) as sums:
        sums.write_text("".join(f"{digest(path)}  {path.name}\n" for path in archives))
    print_calls(options.out, archives, options.call_mib)


def read_pins(path: Path) -> list[str]:
    """The lines name==version of a requirements file."""
    return [line for line in path.read_text().splitlines() if "==" in line and not line.startswith("#")]


def fetch(pins: Sequence[str], wheels: Path) -> None:
    """Download those that are missing, for Python 3.12 on Linux x86_64."""
    target = ["--python-version", "3.12", "--implementation", "cp"]
    for abi in ("cp312", "abi3", "none"):
        target += ["--abi", abi]
    for platform in (*(f"manylinux_2_{minor}" for minor in GLIBC), "manylinux2014", "manylinux1"):
        target += ["--platform", f"{platform}_x86_64"]
    wheels.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    missing = [pin for pin in pins if not find_wheel(wheels, pin)]
    if binary := [pin for pin in missing if pin not in SOURCE]:
        command = [*pip, "download", "--no-deps", "--only-binary=:all:", *target, "--platform", "any"]
        subprocess.run([*command, "--dest", wheels, *binary], check=True)
    if source := [pin for pin in missing if pin in SOURCE]:
        subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", wheels, *source], check=True)


def find_wheel(wheels: Path, pin: str) -> list[Path]:
    """The file of that package and version, or none."""
    return list(wheels.glob(f"{pin.replace('-', '_').replace('==', '-')}-*.whl"))


def pack(path: Path, wheels: Sequence[Path], arch: int | None) -> tuple[int, int]:
    """Write an archive of the wheels' files; returns their number and bytes. arch: keep device code for it alone"""
    members: dict[str, tuple[zipfile.ZipFile, zipfile.ZipInfo]] = {}
    for archive in map(zipfile.ZipFile, wheels):
        for info in archive.infolist():
            if info.is_dir() or any(fnmatch(info.filename, pattern) for pattern in LEFT_OUT):
                continue
            if info.filename in members:
                other, _ = members[info.filename]
                raise SystemExit(f"{info.filename} is in {other.filename} and in {archive.filename}")
            members[info.filename] = archive, info
    size = 0
    with (
        replacing(path) as unfinished,
        lzma.open(unfinished, "wb", filters=FILTERS) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar,
    ):
        for name in sorted(members, key=lambda name: (PurePosixPath(name).suffix, name)):  # like beside like
            archive, info = members[name]
            data: bytes | bytearray = archive.read(info)
            if arch and name == DEVICE_CODE:
                data = bytearray(data)
                print(f"{name}: {blank(data, arch) / MIB:.1f} MiB of device code for other cards left out", flush=True)
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755 if info.external_attr >> 16 & 0o111 else 0o644
            tar.addfile(entry, io.BytesIO(data))
            size += len(data)
    return len(members), size


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def mib(paths: Sequence[Path]) -> float:
    return sum(path.stat().st_size for path in paths) / MIB


def print_calls(out: Path, archives: Sequence[Path], limit: float) -> None:
    """The machine runs them in its own copy of the repository. limit: MiB of a call"""
    repository = repository_mib()
    out = out.resolve()
    out = out.relative_to(ROOT) if out.is_relative_to(ROOT) else out
    for number, paths in enumerate(calls(archives, limit - repository), start=1):
        names = " ".join([SUMS, *(path.name for path in paths)])
        total = repository + mib(paths)
        print(f"\nCall {number}, {total:.1f} MiB: the repository ({repository:.1f} MiB), and from {out}: {names}")
        if total > limit:
            print(f"  {total - limit:.1f} MiB too much: leave docs, examples and tests behind, except tests/support")
        print(f"  python bench/gpu/short.py --stage {out}")


def repository_mib() -> float:
    """Of the files that are in a copy of the repository: tracked, or new and not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sum((ROOT / name).lstat().st_size for name in listed.split("\0") if name and (ROOT / name).exists()) / MIB


def calls(archives: Sequence[Path], limit: float) -> Iterator[list[Path]]:
    """The archives in their order, in each call as many as its MiB allow and at least one."""
    current: list[Path] = []
    for path in archives:
        if current and mib([*current, path]) > limit:
            yield current
            current = []
        current.append(path)
    yield current


if __name__ == "__main__":
    main()
