"""What `import viewtrack` adds to `import torch`, each time in a new interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.registry import quantity

PROGRAM = """
import time
import torch
start = time.perf_counter()
import viewtrack
print(time.perf_counter() - start)
"""


@quantity("import viewtrack after torch", target=0.1, unit="s", repeats=7)
def _seconds() -> float:
    root = Path(__file__).resolve().parent.parent
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True, check=True
    )
    return float(run.stdout)
