"""The package flash-attn as it is published, without its CUDA extension: the count of a pack with it and without.

scripts/gpuset.sh unpacks it into a folder of its own, as its presence alone changes which kernel is used.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpuset
FOLDER = Path(sys.prefix) / "flash-attn"
COUNT = """
import json, sys
from dataclasses import asdict
from tests.toolrl.check.plan.test_cost import PACK, SMALL
from toolrl.check.plan.cost import policy_pass
print(json.dumps(asdict(policy_pass(SMALL, PACK)) | {"package": "flash_attn" in sys.modules}))
"""


def counted(*folders: Path) -> dict[str, Any]:
    path = os.pathsep.join(map(str, [*folders, os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", COUNT], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_it_saves_no_memory_and_next_to_no_traffic(tmp_path: Path) -> None:
    """Its own Python, operators and their shapes run; only the random state of torch's kernel, a kernel's zeros in each
    layer and pass, is left out."""
    if not FOLDER.exists():
        pytest.skip("flash-attn is not unpacked; run bash scripts/gpuset.sh")
    (tmp_path / "flash_attn_2_cuda.py").touch()  # the extension, of which nothing is called
    ours, theirs = counted(), counted(FOLDER, tmp_path)
    assert (ours.pop("package"), theirs.pop("package")) == (False, True)
    assert (ours["saved"], ours["peak"]) == pytest.approx((theirs["saved"], theirs["peak"]), rel=1e-3)
    assert ours["forward"] == theirs["forward"]
    for name in ("gemm_flops", "attention_flops"):
        assert ours["backward"][name] == theirs["backward"][name]
    zeros = ours["backward"]["traffic"] - theirs["backward"]["traffic"]
    assert 0 <= zeros < 1e-2 * ours["backward"]["traffic"]
