"""A `CustomOp` is one with its op: copied, pickled and printed as a function is."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from library_ops import double_rows, fresh, head

from viewtrack import ViewTrackError, library


class First(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.op = head
        self.weight = torch.nn.Parameter(torch.tensor([2.0, 3.0, 4.0]))

    def forward(self, x):
        return self.op(self.weight * x, 2)


@pytest.mark.parametrize(
    "again",
    [copy.copy, copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_of_an_op_is_the_op(again):
    assert again(head) is head
    assert again([head, double_rows]) == [head, double_rows]


@pytest.mark.parametrize(
    "again",
    [copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_of_a_module_that_holds_an_op_trains_apart(again):
    module = First()
    other = again(module)
    view = other(torch.ones(3))
    view.mul_(5)
    view.sum().backward()
    assert other.weight.grad.tolist() == [5, 5, 0]
    assert module.weight.grad is None
    assert other.op is module.op


def test_an_op_that_a_library_owns_is_pickled_while_it_lives():
    lib = torch.library.Library("vtcopies", "DEF")
    op = library.view_op("vtcopies::own(Tensor(a) x) -> Tensor(a)", lambda x: x[:1], lib=lib)
    pickled = pickle.dumps(op)
    assert pickle.loads(pickled) is op
    assert copy.deepcopy({"op": op})["op"] is op


def test_an_op_that_was_defined_again_is_the_new_one():
    schema = fresh("(Tensor(a) x) -> Tensor(a)")
    old = library.view_op(schema, lambda x: x[:1])
    pickled = pickle.dumps(old)
    new = library.view_op(schema, lambda x: x[:2])
    assert pickle.loads(pickled) is new


def test_a_registered_op_is_pickled_too():
    lib = torch.library.Library("vtcopies", "FRAGMENT")
    lib.define("other(Tensor(a) x) -> Tensor(a)")
    lib.impl("other", lambda x: x[1:], "CPU")
    op = library.register("vtcopies::other")
    assert pickle.loads(pickle.dumps(op)) is op


def _run(program, folder, *args):
    command = [sys.executable, "-c", program, *args]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_another_process_imports_what_defines_it(tmp_path):
    (tmp_path / "my_ops.py").write_text(
        "from viewtrack import library\n"
        "head = library.view_op('vtmine::head(Tensor(a) x) -> Tensor(a)', lambda x: x[:1])\n"
    )
    path = str(tmp_path / "op.pickle")
    paths = f"import sys; sys.path[:0] = {[str(tmp_path), *sys.path]!r}\n"
    dump = "import pickle, my_ops; pickle.dump(my_ops.head, open(sys.argv[1], 'wb'))"
    assert _run(paths + dump, tmp_path, path).returncode == 0
    load = "import pickle, torch; op = pickle.load(open(sys.argv[1], 'rb'))\n"
    load += "x = torch.ones(3); print(op(x)._base is x, op)"
    loaded = _run(paths + load, tmp_path, path)
    assert loaded.stdout == "True <CustomOp(vtmine::head(Tensor(a) x) -> Tensor(a))>\n"
    (tmp_path / "my_ops.py").unlink()
    failed = _run(paths + load, tmp_path, path)
    assert "`vtmine::head`" in failed.stderr
    assert "import what defines it" in failed.stderr


def test_an_op_that_is_gone_is_named():
    lib = torch.library.Library("vtcopies", "FRAGMENT")
    op = library.view_op("vtcopies::gone(Tensor(a) x) -> Tensor(a)", lambda x: x[:1], lib=lib)
    pickled = pickle.dumps(op).replace(b"vtcopies::gone", b"vtcopies::none")
    with pytest.raises(ViewTrackError, match="`vtcopies::none`"):
        pickle.loads(pickled)


def test_an_op_is_printed_with_its_schema():
    assert repr(head) == "<CustomOp(vtlib::head(Tensor(a) x, int n) -> Tensor(a))>"
    assert head.__name__ == "head"
