"""Every file in `examples/` runs, and prints what it says it does."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*args):
    """What an example printed, and what went to stderr."""
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


GPT = "examples/train_gpt_with_cache.py"


def line_of(path, text):
    lines = (ROOT / path).read_text().splitlines()
    [number] = [number for number, line in enumerate(lines, 1) if line.strip() == text]
    return f"{path}:{number}"


def losses(out):
    return [float(loss) for loss in re.findall(r"^step +\d+ +loss (\S+)$", out, re.MULTILINE)]


def difference(out):
    [found] = re.findall(r"against the run without a cache: (\S+)$", out, re.MULTILINE)
    return float(found)


def test_gpt_with_cache_learns_and_the_report_is_clean():
    out, report = run("-m", "viewtrack", "run", GPT)
    assert losses(out)[-1] < 0.7 * losses(out)[0]
    assert difference(out) == 0
    assert "(kept by a mode or a hook, then written, then used again): none" in report


def test_gpt_with_cache_and_bug_is_explained():
    stock, quiet = run(GPT, "--bug", "--steps", "4")
    assert quiet == ""  # stock torch says nothing
    assert difference(stock) > 0.1
    out, report = run("-m", "viewtrack", "run", GPT, "--bug", "--steps", "4")
    assert out == stock
    assert "then used again): 1\n" in report
    kept = line_of(GPT, "gate = self.gate(x)")
    written = line_of(GPT, "gate = F.silu(gate, inplace=self.inplace)")
    lines = [line.strip() for line in report.splitlines()]
    at = lines.index("1  kept     aten.mm.default -> f32[512, 128]")
    assert lines[at + 1].startswith(f"{kept} in forward")
    assert lines[at + 3] == "written  aten.silu_.default(self)"
    assert lines[at + 4].startswith(f"{written} in forward")
    assert lines[at + 7].startswith(f"{kept} in forward")


@pytest.mark.parametrize("args", [(), ("--bug",)], ids=["plain", "bug"])
def test_gpt_without_cache_has_the_right_gradients(args):
    out, _ = run(GPT, "--no-cache", "--steps", "1", *args)
    assert difference(out) == 0


def test_gpt_is_deterministic():
    first, again, other = (run(GPT, "--steps", "1", "--seed", seed)[0] for seed in "112")
    assert first == again
    assert first != other


CHECKPOINT = "examples/selective_checkpoint_guard.py"


def test_selective_checkpoint_guard_names_both_lines():
    out, quiet = run(CHECKPOINT)
    assert quiet == ""
    assert "without the bug: equal True" in out
    [off] = re.findall(r"no error, gradient off by (\d+)%", out)
    assert int(off) > 5
    saved = line_of(CHECKPOINT, "hidden = self.up(x)")
    written = line_of(CHECKPOINT, "active = F.elu(hidden, alpha=2.0, inplace=self.inplace)")
    assert re.search(rf"saved +aten.mm.default -> f32\[10, 32\] +\S*{saved} in forward", out)
    assert re.search(rf"written +aten.elu_.default\(self\) +\S*{written} in forward", out)
    assert f"around torch's contexts: aten.elu_.default on line {written.rpartition(':')[2]}" in out


@pytest.mark.compat
def test_peft_bdlora_is_wrong_silently_and_the_guard_names_the_line():
    for package in ("peft", "transformers"):
        pytest.importorskip(package, reason=f"`{package}` is of the `compat` extra")
    out, _ = run("examples/compat_peft_bdlora.py")
    [off] = re.findall(r"no error, gradients off by ([\d.]+)%", out)
    assert float(off) > 1
    lines = re.findall(r"^(.+): aten\.add_\.Tensor at (.+):(\d+) in forward$", out, re.MULTILINE)
    assert [name for name, _, _ in lines] == ["guarded", "torch's, watched from outside"]
    for _, path, number in lines:
        assert path.endswith("peft/tuners/lora/variants.py")
        assert "+=" in Path(path).read_text().splitlines()[int(number) - 1]


def test_mark_as_view_gives_the_gradient_of_its_view_fn_and_one_counter():
    out, _ = run("examples/mark_as_view.py")
    lines = out.splitlines()
    assert lines[0] == "gradient through a scaling view_fn: [20.0, 20.0, 20.0, 20.0]"
    assert lines[-2:] == [
        "kept below autograd: base is the result: True",
        "versions: 1 1 1",
    ]


def test_track_a_mode_shows_what_each_way_mends():
    out, _ = run("examples/track_a_mode.py")
    assert out.splitlines()[:5] == [
        "stock torch            result 2, kept 0, view False",
        "tracked                result 2, kept 2, view True",
        "track()                result 2, kept 2, view False",
        'track(views="full")    result 2, kept 2, view True',
        "base is the result: True - writes known: 2",
    ]
    assert "aten.relu_.default(self) at " in out


def test_the_graph_of_a_view_is_freed():
    out, _ = run("examples/free_the_graph_of_a_view.py")
    assert out.splitlines() == [
        "the output is a view: True, of (4, 16)",
        "stock torch: Can't detach views in-place",
        "detached: requires_grad=False, view=False",
    ]
