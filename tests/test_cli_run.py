import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from viewtrack.cli import main
from viewtrack.cli.script import program_frames
from viewtrack.errors import ViewTrackError
from viewtrack.report import from_json, to_text

ROOT = Path(__file__).parent.parent


def python(*args, cwd, **kwargs):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *args],
        cwd=cwd, env=env, capture_output=True, text=True, timeout=120, **kwargs,
    )  # fmt: skip


def viewtrack(*args, cwd, **kwargs):
    return python("-m", "viewtrack", *args, cwd=cwd, **kwargs)


# ------------------------------------------------------------------------------ as `python` would

FACTS = """# -*- coding: latin-1 -*-
from __future__ import annotations
import sys
x: unknown = ascii("é")
print(x, __annotations__)
print(__name__, __file__, __package__, __spec__ and __spec__.name, __doc__)
print(sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals())
"""

PROGRAMS = {
    "facts": FACTS,
    "exit-status": "import sys; print('out'); sys.exit(3)",
    "exit-message": "import sys; sys.exit('what went wrong')",
    "error": "def f():\n    raise ValueError('two\\nlines')\n\nf()\n",
    "error-in-an-op": "import torch\ntorch.ones(3) @ torch.ones(4)\n",
    "error-in-a-handler": """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

with Mode():
    torch.ones(3) @ torch.ones(4)
""",
    "own-excepthook": """
import sys, traceback
def hook(kind, value, tb):
    print([frame.name for frame in traceback.extract_tb(tb)], value.__traceback__ is tb)
sys.excepthook = hook
1 / 0
""",
    "no-python": "x = = 1\n",
    "interrupted": "raise KeyboardInterrupt",
    "afterwards": """
import atexit, pickle, threading
class Point:
    pass
def later():
    started.wait()
    print("thread", pickle.loads(pickle.dumps(Point())).__class__ is Point)
started = threading.Event()
threading.Thread(target=later).start()
atexit.register(lambda: print("atexit", Point))
started.set()
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_script_runs_as_it_does_under_python(name, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "script.py").write_text(PROGRAMS[name], encoding="latin-1")
    script = os.path.join("sub", "script.py")
    want = python(script, "a", "--json", "-f", cwd=tmp_path)
    got = viewtrack("run", "-o", "report", script, "a", "--json", "-f", cwd=tmp_path)
    assert got.returncode == want.returncode
    assert got.stdout == want.stdout
    assert got.stderr.replace("viewtrack: wrote `report`\n", "") == want.stderr
    assert "viewtrack report on `sub/script.py a --json -f`" in (tmp_path / "report").read_text()


@pytest.mark.parametrize(
    "args", [("-m", "package", "a", "-x"), ("-m", "package.part"), ("folder",)]
)
def test_modules_and_folders_too(args, tmp_path):
    for path in (
        "package/__init__.py",
        "package/__main__.py",
        "package/part.py",
        "folder/__main__.py",
    ):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(
            "" if path.endswith("__init__.py") else FACTS, encoding="latin-1"
        )
    want = python(*args, cwd=tmp_path)
    got = viewtrack("run", "-o", "report", *args, cwd=tmp_path)
    assert (got.returncode, got.stdout) == (0, want.stdout)


ON_STDIN = {
    "facts": """
import sys
x: int = 1
print({n: v for n, v in vars().items() if n not in ("__builtins__", "sys")}, __builtins__)
print(sys.argv, sys.path[0] == "", sys.modules["__main__"].__dict__ is globals())
import beside
print(repr(sys.stdin.read()))
""",
    "exit-status": "import sys; sys.exit(3)",
    "error": "def f():\n    raise ValueError('no')\n\nf()\n",
    "no-python": "x = = 1\n",
}


@pytest.mark.parametrize("name", ON_STDIN)
def test_a_script_on_stdin_runs_as_it_does_under_python(name, tmp_path):
    (tmp_path / "beside.py").write_text("print('imported')")
    want = python("-", "a", "-o", cwd=tmp_path, input=ON_STDIN[name])
    got = viewtrack("run", "-o", "report", "-", "a", "-o", cwd=tmp_path, input=ON_STDIN[name])
    assert got.returncode == want.returncode
    assert got.stdout == want.stdout
    assert got.stderr.replace("viewtrack: wrote `report`\n", "") == want.stderr
    assert "viewtrack report on `- a -o`" in (tmp_path / "report").read_text()


# ------------------------------------------------------------------------------ what it reports

SPOILT = """
import torch
from caches import HandOut, Keep

def main():
    x = torch.full((4, 4), 2.0)
    keep = Keep(lambda t: t.detach())
    with keep:
        out = x @ x
    out.mul_(3)
    with HandOut(keep):
        x @ x

main()
"""


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory):
    """A folder with a program that has a hazard, run once with its reports in files."""
    folder = tmp_path_factory.mktemp("spoilt")
    (folder / "spoilt.py").write_text(SPOILT)
    (folder / "caches.py").write_text((ROOT / "tests" / "caches.py").read_text())
    done = viewtrack("run", "-o", "report.txt", "--json", "report.json", "spoilt.py", cwd=folder)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines() == [
        "viewtrack: wrote `report.txt`",
        "viewtrack: wrote `report.json`; next: python -m viewtrack report report.json",
    ]
    return folder


def test_the_report_names_both_lines(spoilt):
    lines = (spoilt / "report.txt").read_text().splitlines()
    assert lines[0] == "viewtrack report on `spoilt.py`"
    kept = lines.index("  1  kept     aten.mm.default -> f32[4, 4]")
    assert lines[kept + 1].strip() == "spoilt.py:9 in main:  out = x @ x"
    written = lines.index("     written  aten.mul_.Tensor(self)")
    assert lines[written + 1].strip() == "spoilt.py:10 in main:  out.mul_(3)"


def test_json_can_be_shown_again(spoilt, capsys, monkeypatch):
    monkeypatch.chdir(spoilt)
    report = from_json((spoilt / "report.json").read_text())
    assert [row.hazard.op for row in report.hazards] == ["aten.mm.default"]
    assert main(["report", "report.json"]) == 0
    assert capsys.readouterr().out == (spoilt / "report.txt").read_text()


def test_record_none_finds_no_hazards_and_stack_shows_callers(spoilt):
    none = viewtrack("run", "--record", "none", "spoilt.py", cwd=spoilt)
    assert "hazards: not looked for (record=none)" in none.stderr
    stack = viewtrack("run", "--record", "stack", "spoilt.py", cwd=spoilt)
    assert "called from spoilt.py:14 in <module>\n" in stack.stderr
    assert "viewtrack/" not in stack.stderr


def test_a_program_that_fails_is_reported_all_the_same(tmp_path):
    (tmp_path / "fail.py").write_text(
        "import torch\ntorch.ones(2).add_(1)\nraise OSError('full')\n"
    )
    done = viewtrack("run", "fail.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "ended with OSError: full\n" in done.stderr
    assert "1  aten.add_.Tensor(self)  fail.py:2 in <module>:" in done.stderr
    assert done.stderr.endswith("OSError: full\n")  # the traceback is last, where it is looked for


def test_a_report_says_of_whom_it_knows_nothing(tmp_path):
    (tmp_path / "threads.py").write_text(
        "import threading, torch\ndef work():\n    torch.ones(2).add_(1)\n"
        "ts = [threading.Thread(target=work) for _ in range(2)]\n"
        "for t in ts: t.start()\nfor t in ts: t.join()\n"
    )
    done = viewtrack("run", "threads.py", cwd=tmp_path)
    assert "used again): none\n  in this thread and process; what autograd itself" in done.stderr
    assert (
        "not in this report: ops, if any, of 2 other threads (Thread-1 (work), Thread-2 (work))\n"
        in done.stderr
    )


def test_what_autograd_saves_can_be_guarded(tmp_path):
    (tmp_path / "data.py").write_text(
        "import torch\nw = torch.ones(3, requires_grad=True)\nx = torch.ones(3)\n"
        "y = (w * x).sum()\nx.data.mul_(2)\ny.backward()\nprint(w.grad.tolist())\n"
    )
    plain = viewtrack("run", "data.py", cwd=tmp_path)
    assert (plain.returncode, plain.stdout) == (0, "[2.0, 2.0, 2.0]\n")
    guarded = viewtrack("run", "--guard-saved", "data.py", cwd=tmp_path)
    assert (guarded.returncode, guarded.stdout) == (1, "")
    assert "ended with MutatedTensorError: " in guarded.stderr
    assert "data.py:5 in <module>:  x.data.mul_(2)" in guarded.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_report(tmp_path):
    (tmp_path / "fork.py").write_text(
        "import os, sys\nif os.fork() == 0:\n    sys.exit(0)\nos.wait()\n"
    )
    done = viewtrack("run", "fork.py", cwd=tmp_path)
    assert done.stderr.count("viewtrack report on") == 1
    assert "not in this report: ops, if any, of 1 forked process\n" in done.stderr


# ------------------------------------------------------------------------------ files and errors


def error_of(capsys, *args):
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2
    return capsys.readouterr().err.splitlines()[-1].partition("error: ")[2]


@pytest.mark.parametrize("option", ["-o", "--json"])
def test_a_file_is_not_written_over_unless_told_to(option, tmp_path):
    (tmp_path / "script.py").write_text("print('it ran')")
    (tmp_path / "there").write_text("mine")
    refused = viewtrack("run", option, "there", "script.py", cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")  # refused before anything ran
    assert "`there` exists already; pass -f to write over it" in refused.stderr
    assert (tmp_path / "there").read_text() == "mine"
    forced = viewtrack("run", "-f", option, "there", "script.py", cwd=tmp_path)
    assert (forced.returncode, forced.stdout) == (0, "it ran\n")
    assert "script.py" in (tmp_path / "there").read_text()


@pytest.mark.parametrize(
    ("args", "want"),
    [
        ((), "name a script to run, or a module with -m"),
        (("-m",), "name a module after -m"),
        (("no.py",), "can't open file `.*no.py`: no such file"),
        (("-o", "no/report", __file__), "there is no folder `no` to write `no/report` in"),
        (("-o", ".", __file__), "`.` is a folder; name a file"),
        (("--record", "all", __file__), "argument --record: invalid choice: 'all'"),
    ],
)
def test_what_run_refuses(args, want, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert re.match(want, error_of(capsys, "run", *args))


def test_a_module_that_is_not_there(tmp_path):
    done = viewtrack("run", "-m", "no_such_module", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "no module named `no_such_module`, or it has no `__main__`"
    )


def test_what_report_refuses(capsys, tmp_path):
    (tmp_path / "text").write_text("text")
    assert "No such file" in error_of(capsys, "report", str(tmp_path / "none"))
    assert "not a report of viewtrack" in error_of(capsys, "report", str(tmp_path / "text"))


def test_report_writes_a_file(capsys, spoilt, tmp_path):
    source, target = spoilt / "report.json", tmp_path / "out"
    assert main(["report", str(source), "-o", str(target), "--all"]) == 0
    assert target.read_text() == to_text(from_json(source.read_text()), limit=None)
    assert "exists already" in error_of(capsys, "report", str(source), "-o", str(target))


def test_help_tells_what_a_hazard_is(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["run", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "usage: python -m viewtrack run [options] (script.py | - | -m module) [args ...]" in text
    assert "that was written," in text


# ------------------------------------------------------------------------------ tracebacks


@pytest.mark.parametrize(
    ("error", "stays"),
    [(RuntimeError("an op"), False), (ViewTrackError("ours"), True), (KeyError("a bug"), True)],
)
def test_our_last_frame_stays_if_the_error_is_ours(error, stays):
    inner = compile("def inner(error): raise error", str(ROOT / "viewtrack" / "mode.py"), "exec")
    names = {}
    exec(inner, names)

    def user():
        names["inner"](error)

    with pytest.raises(type(error)) as caught:
        user()
    frames, tb = [], program_frames(error, caught.value.__traceback__)
    while tb is not None:
        frames.append(tb.tb_frame.f_code.co_name)
        tb = tb.tb_next
    assert frames[-1] == ("inner" if stays else "user")
