"""What `import viewtrack` adds to `import torch`, in processor time, in a new interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.registry import quantity

PROGRAM = """
import time
import torch
start = time.process_time()
import viewtrack
print(time.process_time() - start)
"""


@quantity("import viewtrack after torch", target=0.1, unit="s", repeats=7)
def _seconds() -> float:
    root = Path(__file__).resolve().parent.parent
    # Compiled once, as installers do and Python by itself; some machines switch that off.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    return float(run.stdout)
