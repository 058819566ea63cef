"""The example of a float8-like weight trains, and its views are real ones."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from viewtrack.testing import SubclassConformance

ROOT = Path(__file__).parent.parent


def test_it_trains_as_float32_weights_do():
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "examples/fp8_like_tensor.py", "--steps", "80"]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    losses = re.findall(r"weights +loss (\S+) -> (\S+)", run.stdout)
    (plain_first, plain_last), (first, last) = [tuple(map(float, pair)) for pair in losses]
    assert plain_last < plain_first - 0.5
    assert last < first - 0.5
    assert abs(last - plain_last) < 0.5
    assert "a row is a view of the weight: True" in run.stdout
    assert "moved by 1 1 1" in run.stdout
    assert "a copy gives the same: True" in run.stdout


@pytest.fixture(scope="module")
def fp8():
    namespace = {"__name__": "fp8_like_tensor"}
    source = ROOT / "examples" / "fp8_like_tensor.py"
    exec(compile(source.read_text(), str(source), "exec"), namespace)
    return namespace["Fp8LikeTensor"]


class TestFp8LikeTensor(SubclassConformance):
    """The mixin on a class that rounds, and whose functional results are plain tensors."""

    unsupported = frozenset({"set_", "resized_out", "max_dim_out"})
    results_are_plain = True

    @pytest.fixture(autouse=True)
    def _example(self, fp8):
        self.cls = fp8

    def make(self, inner):
        # A scale of its own, since the parts of a tensor share it.
        scale = torch.tensor(0.125)
        return self.cls((inner / scale).to(torch.float8_e4m3fn), scale, dtype=inner.dtype)

    def read(self, t):
        return t.dequantize()

    def same(self, found, expected):
        return torch.allclose(found, expected, rtol=0.15, atol=0.05)
