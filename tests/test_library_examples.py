"""The examples of custom ops run, and print what they say they do."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*args):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.heavy)]
)
def test_a_custom_view_op(backend):
    out = run("examples/custom_view_op.py", "--steps", "21", "--backend", backend)
    assert "view of the signal: True, versions 1 1" in out
    losses = [float(loss) for loss in re.findall(r"^step +\d+ +loss (\S+)$", out, re.MULTILINE)]
    assert losses[-1] < losses[0] - 1
    apart = [float(number) for number in re.findall(r"^gradients .*: (\S+)$", out, re.MULTILINE)]
    assert len(apart) == 2
    assert max(apart) < 1e-5


def test_a_custom_inplace_kernel():
    out = run("examples/custom_inplace_kernel.py").splitlines()
    assert out == [
        "torch.library alone goes on with a gradient of 0.000 where e is right",
        "viewtrack.library raises: one of the variables needed for gradient computation has been "
        "modified by an inplace operation",
        "gradient against a mask: 0.0e+00",
        "compiled gives the same: True",
    ]


@pytest.mark.parametrize(
    ("op", "module"),
    [("demo::windows", "custom_view_op"), ("demo::drop_rows_", "custom_inplace_kernel")],
)
def test_the_command_line_checks_them(op, module):
    out = run("-m", "viewtrack", "check", op, "-i", f"examples.{module}")
    assert f"{op}: no findings" in out
