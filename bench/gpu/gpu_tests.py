"""`pytest -m gpu`: passed, failed and skipped tests; the names of the failed.

bash bench/gpu/first_hour.sh tests
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from xml.etree import ElementTree

from piece import ROOT, start

FILES = ("tests/test_gpu.py", "tests/workers/test_kernels.py")

if __name__ == "__main__":
    piece, _ = start(__doc__)
    report = piece.out / "junit.xml"
    report.unlink(missing_ok=True)  # of an earlier call
    subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", *FILES, f"--junitxml={report}"],
        cwd=ROOT,
        check=False,
    )
    if not report.exists():
        raise SystemExit("pytest did not run")
    cases = list(ElementTree.parse(report).iter("testcase"))
    outcomes = {each: next((child.tag for child in each if child.tag != "system-out"), "passed") for each in cases}
    counts = Counter(outcomes.values())
    failed = [each.attrib["name"] for each, outcome in outcomes.items() if outcome in ("failure", "error")]
    names = {"passed": "passed", "skipped": "skipped", "failure": "failed", "error": "errors"}
    piece.write({shown: counts[tag] for tag, shown in names.items()} | {"failed tests": ", ".join(failed) or "none"})
