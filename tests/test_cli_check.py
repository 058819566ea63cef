"""`python -m viewtrack check`, and the inputs that it makes up."""

import subprocess
import sys

import pytest
import torch
from library_ops import axpy_, raw_zero_

from viewtrack import ViewTrackError, cli
from viewtrack.testing.op_inputs import SHAPES, inputs_for

_lib = torch.library.Library("vtcli", "DEF")


def defined(schema, body, key="CPU"):
    """An op without any kernel of ours."""
    _lib.define(schema)
    name = schema.split("(")[0]
    _lib.impl(name, body, key)
    return getattr(torch.ops.vtcli, name).default


defined("head(Tensor(a) x) -> Tensor(a)", lambda x: x[:1])


def _never(x):
    raise ValueError("no")


never = defined("never(Tensor x) -> ()", _never)
_lib.define("many.one(Tensor x) -> Tensor")
_lib.define("many.two(Tensor x, int n) -> Tensor")
_lib.impl("many.one", lambda x: x + 1, "CPU")
_lib.impl("many.two", lambda x, n: x.view(-1), "CPU")

OPS = """
import torch
lib = torch.library.Library({namespace!r}, 'FRAGMENT')
lib.define('mine(Tensor x, int n) -> Tensor')
lib.impl('mine', lambda x, n: x[:n], 'CPU')
lib.define('good(Tensor x) -> Tensor')
lib.impl('good', lambda x: x + 1, 'CPU')
def inputs():
    yield torch.ones(3), 2
"""


@pytest.fixture(autouse=True)
def own_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


# The inputs.


def test_inputs_are_made_up_from_the_schema():
    op = defined("pick(Tensor(a) x, int dim, int[]? sizes, *, bool up) -> Tensor(a)",
                 lambda x, dim, sizes, up: x.select(dim, 0))  # fmt: skip
    accepted = inputs_for(op)
    assert set(SHAPES) - set(accepted) == {"scalar"}
    (x, dim, sizes), named = accepted["matrix"]
    assert (x.shape, dim, sizes, named) == ((3, 4), 1, None, {"up": False})
    assert accepted["vector"][0][1] == 0  # it has no dimension 1


def test_sizes_are_such_as_the_op_takes():
    accepted = inputs_for(torch.ops.aten.view.default)
    assert accepted["vector"][0][1] == [4]
    assert accepted["one element"][0][1] == [1]
    assert accepted["matrix"][0][1] == [3, 4]


def test_optional_tensors_are_given_and_left_out():
    given = []
    op = defined("maybe(Tensor x, *, Tensor? y=None) -> Tensor",
                 lambda x, y=None: given.append(y is None) or x + 1)  # fmt: skip
    accepted = inputs_for(op)
    assert accepted["matrix"][1] == {"y": None}
    assert accepted["matrix, with optional tensors"][1]["y"].shape == (3, 4)
    assert set(given) == {True, False}


def test_trying_inputs_harms_nothing():
    """A kernel that takes an expanded tensor for contiguous writes beyond it."""
    assert "expanded" not in inputs_for(raw_zero_.op)  # it is refused before it is written
    accepted = inputs_for(axpy_.op)
    assert accepted["matrix"][0][0].sum() == 78


def test_no_input_fits():
    with pytest.raises(ViewTrackError, match=r"takes none.*ValueError: no"):
        inputs_for(never)


# The command.


def test_a_fault_is_told_with_its_input(capsys):
    assert cli.main(["check", "vtcli::head"]) == 1
    said = capsys.readouterr().out
    assert "`vtcli::head` returned output 0 as a view of `x`" in said
    assert "(input: matrix" in said
    assert "vtcli::head: 1 finding over" in said


def test_good_ops_pass(capsys):
    assert cli.main(["check", "vtlib::axpy_"]) == 0
    assert "vtlib::axpy_: no findings over" in capsys.readouterr().out


def test_a_kernel_that_goes_by_no_strides_is_found(capsys):
    assert cli.main(["check", "vtlib::raw_zero_"]) == 1
    said = capsys.readouterr().out
    assert "wrote memory beside argument `x`" in said
    assert "(input: every other column" in said


def test_wrong_outputs_are_findings_and_no_refusals(capsys):
    defined("some(Tensor x) -> ()", lambda x: x + 1)
    assert cli.main(["check", "vtcli::some"]) == 1
    assert "return None but it returned something else" in capsys.readouterr().out

    @torch.library.custom_op("vtcli::itself", mutates_args=())
    def itself(x: torch.Tensor) -> torch.Tensor:
        return x

    assert cli.main(["check", "vtcli::itself"]) == 1
    assert "output 0 in the memory of argument `x`" in capsys.readouterr().out


def test_notes_are_told_when_asked_for_and_change_no_status(capsys):
    defined("idle(Tensor(a!) x) -> ()", lambda x: None)
    assert cli.main(["check", "vtcli::idle"]) == 0
    assert "note:" not in capsys.readouterr().out
    assert cli.main(["check", "vtcli::idle", "--notes"]) == 0
    said = capsys.readouterr().out
    assert "note: `vtcli::idle` wrote argument `x` for no input" in said
    assert "vtcli::idle: no findings" in said


def test_all_overloads_of_a_name_and_patterns(capsys):
    assert cli.main(["check", "vtcli::many"]) == 1
    said = capsys.readouterr().out
    assert "vtcli::many.one: no findings" in said
    assert "vtcli::many.two: 1 finding" in said
    assert "2 ops: 1 clean, 1 with findings, 0 not checked" in said
    assert cli.main(["check", "vtcli::many.one"]) == 0
    assert cli.main(["check", "vtcli::m*.o?e", "vtcli::many.one"]) == 0
    assert capsys.readouterr().out.count("vtcli::many.one: no findings") == 2


def test_an_op_that_cannot_be_called_is_told_beside_others(capsys):
    assert cli.main(["check", "vtcli::never", "vtcli::many.one"]) == 2
    captured = capsys.readouterr()
    assert "vtcli::never: not checked: `vtcli::never` takes none" in captured.err
    assert "vtcli::many.one: no findings" in captured.out
    assert cli.main(["check", "vtcli::never", "vtcli::head"]) == 1


def test_a_module_is_imported_and_gives_inputs(tmp_path, capsys):
    (tmp_path / "vt_my_ops.py").write_text(OPS.format(namespace="vtcli1"))
    args = ["check", "vtcli1::mine", "--import", "vt_my_ops", "--inputs", "vt_my_ops:inputs"]
    assert cli.main(args) == 1
    said = capsys.readouterr().out
    assert "output 0 in the memory of argument `x`" in said
    assert "(input 0" in said


def test_a_file_is_checked_whole(tmp_path, capsys):
    path = tmp_path / "vt_file_ops.py"
    path.write_text(OPS.format(namespace="vtcli2"))
    assert cli.main(["check", str(path)]) == 1
    said = capsys.readouterr().out
    assert "vtcli2::good: no findings" in said
    assert "vtcli2::mine: 1 finding" in said
    assert "2 ops: 1 clean, 1 with findings" in said
    assert cli.main(["check", "vtcli2::good", "-i", str(path)]) == 0


def test_a_file_whose_name_a_module_has_already(tmp_path, capsys):
    path = tmp_path / "json.py"
    path.write_text(OPS.format(namespace="vtcli3"))
    import json

    assert cli.main(["check", str(path)]) == 1
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["vtcli::absent"], "there is no op `vtcli::absent`; in `vtcli` there is"),
        (["vtcli::hed"], "`vtcli::head`"),
        (["vtnone::*"], "nor any other in `vtnone`"),
        (["idle"], "`vtcli::idle`"),
        (["vtcli::head", "--import", "vt_no_such_module"], "cannot load `vt_no_such_module`"),
        (["vtcli::head", "--import", "no/such.py"], "there is no file `no/such.py`"),
        (["vtcli::head", "--import", "no/such.so"], "cannot load `no/such.so`"),
        (["vtcli::head", "--inputs", "sys:no_such_function"], "there is no such function"),
        (["vtcli::head", "--inputs", "no_colon"], "write MODULE:FUNCTION"),
        (["vtcli::head", "-i", "wrong.py"], "`wrong.py` raised ZeroDivisionError"),
        (["none.py"], "`none.py` defines no op"),
        ([], "required: op"),
    ],
)
def test_what_cannot_be_done_is_told(tmp_path, args, says, capsys):
    (tmp_path / "wrong.py").write_text("1 / 0\n")
    (tmp_path / "none.py").write_text("")
    with pytest.raises(SystemExit) as left:
        cli.main(["check", *args])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert "usage: python -m viewtrack check" in said
    assert says in said


def test_inputs_that_do_not_fit(tmp_path, capsys):
    (tmp_path / "vt_bad_inputs.py").write_text("def two():\n    return [(1, 2)]\n")
    assert cli.main(["check", "vtcli::head", "--inputs", "vt_bad_inputs:two"]) == 2
    assert "input 0 does not fit the schema of `vtcli::head`" in capsys.readouterr().err


def test_a_kernel_that_ends_the_process_leaves_a_trace(tmp_path):
    (tmp_path / "vt_crash.py").write_text(
        "import ctypes, torch\n"
        "lib = torch.library.Library('vtcrash', 'DEF')\n"
        "lib.define('crash(Tensor x) -> ()')\n"
        "def crash(x):\n"
        "    ctypes.string_at(0)\n"
        "lib.impl('crash', crash, 'CPU')\n"
    )
    command = [sys.executable, "-c", _MAIN.format(path=sys.path), "check", "vt_crash.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode < 0
    assert "vt_crash.py" in done.stderr
    assert "in crash" in done.stderr


_MAIN = """
import sys; sys.path[:0] = {path!r}
from viewtrack.cli import main
sys.exit(main(sys.argv[1:]))
"""
