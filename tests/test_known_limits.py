"""The rows of LIMITATIONS.md, executable: each test states what one would wish for.

A test that passes here fails the run (`strict`): then the row goes, and the test moves.
"""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from handlers import On, Wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from write_ways import one_process_group

import viewtrack as vt
from viewtrack.report import Recorder

ROOT = Path(__file__).parent.parent

limit = pytest.mark.xfail(strict=True, raises=AssertionError)
compiled_below_a_mode = pytest.mark.skipif(
    torch.__version__ < (2, 7), reason="torch 2.6 does not compile it as soon as a mode is active"
)
_define = vt.library.op


@limit
def test_a_write_through_data_moves_the_counter():
    x = torch.zeros(2)
    with vt.track():
        x.data.add_(1)
    assert x._version == 1


def test_a_write_through_data_is_recorded_all_the_same():
    x = torch.zeros(2)
    with vt.track():
        x.data.add_(1)
    assert vt.storage_version(x) == 1


@limit
def test_a_write_by_numpy_moves_the_counter():
    x = torch.zeros(2)
    with vt.track():
        x.numpy()[0] = 1
    assert x._version == 1


@limit
def test_a_write_by_numpy_is_recorded():
    x = torch.zeros(2)
    with vt.track():
        x.numpy()[0] = 1
    assert vt.storage_version(x) == 1


class CallsTwice(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _raw_write(x):
    x.detach().numpy()[...] *= 2


@limit
def test_a_handler_that_writes_twice_by_an_opaque_op_counts_twice():
    op = _define("vtlimits::twice_(Tensor(a!) x) -> ()", _raw_write, opaque=True)
    x = torch.zeros(1)
    with vt.track(), CallsTwice():
        op(x)
    assert x._version == 2


class AddsByForeach(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.add_.Tensor:
            torch._foreach_add_([args[0].detach()], 1)
            return args[0]
        return func(*args, **(kwargs or {}))


@vt.tracked
class Tracked(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@limit
def test_a_write_by_a_foreach_op_counts_once_above_a_tracked_mode():
    x = torch.zeros(1)
    with vt.track(), Tracked(), AddsByForeach():
        x.add_(1)
    assert x._version == 1


@limit
def test_a_collective_moves_a_counter_where_nothing_tracks(tmp_path):
    x = torch.zeros(2)
    with one_process_group(tmp_path / "store"):
        torch.distributed.broadcast(x, 0)
    assert x._version == 1


def _note_a_write(moved):
    """Write, and add to `moved` by how much that moved the counter."""
    t = torch.zeros(2)
    t.add_(1)
    moved.append(t._version)


@limit
def test_a_handler_that_is_asked_since_a_mode_declined_is_counted():
    moved = []

    class Declined(Wrapper):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            _note_a_write(moved)
            return super().__torch_dispatch__(func, types, args, kwargs)

    class Declines(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return NotImplemented if Declined in types else func(*args, **(kwargs or {}))

    with vt.track(), Declines():
        Declined(torch.ones(2)).sin()
    assert moved == [1]


@limit
def test_a_mode_that_is_put_on_the_stack_unseen_is_counted():
    moved = []
    mode = On(torch.ops.aten.sin.default, lambda _: _note_a_write(moved))
    with vt.track():
        torch._C._push_on_torch_dispatch_stack(mode)
        torch.ones(2).sin()
        torch._C._pop_torch_dispatch_stack(None)
    assert moved == [1]


@limit
def test_another_thread_is_tracked():
    x = torch.zeros(2)
    with vt.track():
        thread = threading.Thread(target=lambda: x.add_(1))
        thread.start()
        thread.join()
    assert vt.storage_version(x) == 1


@limit
def test_a_fused_optimizer_moves_the_counters_of_its_parameters():
    p = torch.ones(2, requires_grad=True)
    p.grad = torch.ones(2)
    with vt.track():
        torch.optim.Adagrad([p], lr=0.1, fused=True).step()
    assert p._version == 1


@limit
@pytest.mark.parametrize("split", [torch.unsafe_split, torch.unsafe_chunk])
def test_unsafe_pieces_share_the_counter(split):
    x = torch.zeros(4)
    with vt.track():
        piece = split(x, 2)[0]
        x.add_(1)
    assert piece._version == x._version


@limit
@pytest.mark.parametrize("views", ["version", "full"])
def test_a_view_is_differentiable_inside_the_handler_that_made_it(views):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.was_view = out._is_view()
            return out

    with vt.track(views=views), Mode() as mode:
        torch.zeros(4).view(2, 2)
    assert mode.was_view


@limit
def test_an_inference_tensor_has_a_version():
    with torch.inference_mode():
        x = torch.zeros(2)
    assert vt.version(x) is not None


@limit
def test_an_inference_tensor_can_be_viewed():
    with torch.inference_mode():
        base = torch.zeros(4)
        t = base.detach()
    assert vt.mark_as_view(t, base)._is_view()


# Custom ops.


def _raw_double(x):
    x.detach().numpy()[...] *= 2
    return x


def _first_half(x):
    x.mul_(2)
    return _raw_double(x)


@limit
@pytest.mark.parametrize(
    ("name", "body", "grad"),
    [("raw", _raw_double, 2), ("partly raw", _first_half, 4)],
    ids=["raw", "partly raw"],
)
def test_a_raw_write_has_a_gradient(name, body, grad):
    schema = f"vtlimits::{name.replace(' ', '_')}(Tensor(a!) x) -> Tensor(a!)"
    op = _define(schema, body)
    leaf = torch.ones(2, requires_grad=True)
    out = op(leaf * 1)
    assert _succeeds(lambda: out.sum().backward())
    assert leaf.grad.tolist() == [grad] * 2


@limit
def test_a_view_with_a_formula_is_written_inside_a_transform():
    op = _define("vtlimits::head(Tensor(a) x) -> Tensor(a)", lambda x: x[:1])
    op.register_autograd(lambda ctx, grad: torch.cat([grad, grad * 0]))

    def fn(x):
        base = x * 1
        op(base).mul_(3)
        return base.sum()

    assert _succeeds(lambda: torch.func.grad(fn)(torch.ones(2)))


@limit
def test_the_views_of_an_op_with_an_autograd_kernel_of_its_own_are_written():
    class Head(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with torch._C._AutoDispatchBelowAutograd():
                return torch.ops.vtlimits.own(x)

        @staticmethod
        def backward(ctx, grad):
            return torch.cat([grad, grad * 0])

    lib = torch.library.Library("vtlimits", "FRAGMENT")
    lib.define("own(Tensor(a) x) -> Tensor(a)")
    lib.impl("own", lambda x: x[:1], "CPU")
    lib.impl("own", lambda x: Head.apply(x), "Autograd")
    vt.library.register("vtlimits::own", lib=lib)
    base = torch.ones(2, requires_grad=True) * 1
    assert _succeeds(lambda: torch.ops.vtlimits.own(base).mul_(3))


@limit
def test_an_opaque_view_is_compiled():
    op = _define("vtlimits::opaque(Tensor(a) x) -> Tensor(a)", lambda x: x[:1], opaque=True)
    op.register_fake(lambda x: x[:1])
    fn = torch.compile(lambda x: op(x * 2) + 1, backend="aot_eager", fullgraph=True)
    assert _succeeds(lambda: fn(torch.ones(2)))


@limit
def test_an_out_tensor_is_written_though_the_op_asks_for_modes():
    out = torch.zeros((), dtype=torch.int64)
    with vt.track():
        torch.linalg.matrix_rank(torch.eye(3), out=out)
    assert out.item() == 3


@limit
def test_reshape_records_what_it_records_without_a_mode():
    x = torch.ones(3, requires_grad=True).expand(2, 3)
    stock = x.reshape(2, 3).grad_fn.name()
    with vt.track():
        assert x.reshape(2, 3).grad_fn.name() == stock


class _Subclass(torch.Tensor):
    pass


@limit
def test_a_subclass_is_constructed_by_its_class():
    with vt.track():
        assert _succeeds(lambda: _Subclass(torch.ones(2)))


def test_a_subclass_is_made_in_the_other_ways():
    with vt.track():
        assert type(torch.ones(2).as_subclass(_Subclass)) is _Subclass
        assert type(torch.Tensor._make_subclass(_Subclass, torch.ones(2))) is _Subclass


@compiled_below_a_mode
@limit
def test_a_compiled_view_without_grad_has_no_history():
    def f(x):
        y = x * 2
        with torch.no_grad():
            return y, y[0]

    x = torch.ones(3, requires_grad=True)
    with vt.track():
        assert torch.compile(f, backend="aot_eager")(x)[1].grad_fn is None


def _hazards_of_a_cached_product(write, *, keep, answer):
    """The hazards where a handler keeps something of a product, and answers the next with it."""

    class Cache(TorchDispatchMode):
        kept = None

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is not torch.ops.aten.mm.default:
                return func(*args, **(kwargs or {}))
            if self.kept is None:
                out = func(*args)
                self.kept = keep(args, out)
                return out
            return answer(self.kept, lambda: func(*args))

    x = torch.ones(2, 2)
    with Recorder() as recorder, Cache():
        out = x @ x.clone()
        write(x, out)
        x.clone() @ x.clone()
    return recorder.report("test").hazards


@limit
def test_an_idempotent_write_to_a_cached_tensor_is_no_hazard():
    assert not _hazards_of_a_cached_product(
        lambda x, out: out.relu_(),
        keep=lambda args, out: out.detach(),
        answer=lambda kept, run: kept,
    )


@limit
def test_what_a_handler_reads_beside_running_the_op_is_a_hazard():
    assert _hazards_of_a_cached_product(
        lambda x, out: out.add_(1),
        keep=lambda args, out: out.detach(),
        answer=lambda kept, run: run() + kept,
    )


@limit
def test_an_argument_that_a_handler_keeps_as_it_is_is_a_hazard():
    assert _hazards_of_a_cached_product(
        lambda x, out: x.add_(1), keep=lambda args, out: args[0], answer=lambda kept, run: kept
    )


@limit
def test_a_script_may_set_what_torch_reads_when_it_is_imported(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nos.environ['OMP_NUM_THREADS'] = '3'\nimport torch\n"
        "print(torch.get_num_threads())\n"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "viewtrack", "run", str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == "3\n"


def _succeeds(fn):
    try:
        fn()
    except Exception:
        return False
    return True


def _kept_piece(op):
    class Keep(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mul.Tensor:
                self.kept = op(out)
            return out

    return Keep


@limit
def test_a_kept_piece_of_a_library_op_is_not_written():
    lib = torch.library.Library("vtlimits", "FRAGMENT")
    lib.define("halves(Tensor(a) x) -> Tensor(a)[]")
    lib.impl("halves", lambda x: list(x.split(2)), "CPU")
    x = torch.ones(4, requires_grad=True)
    with vt.track(views="full"), _kept_piece(lambda t: torch.ops.vtlimits.halves(t)[0])() as mode:
        x * 2
    assert not _succeeds(lambda: mode.kept.mul_(3))


@limit
def test_what_a_tracked_handler_keeps_has_a_history_at_once():
    with vt.tracked(_kept_piece(lambda t: t[1:]))() as mode:
        torch.ones(4, requires_grad=True) * 2
    assert mode.kept.grad_fn is not None


@limit
def test_what_was_kept_before_the_base_is_detached_keeps_its_gradient():
    with vt.track(views="full"), _kept_piece(lambda t: t[1:])() as mode:
        y = torch.ones(4, requires_grad=True) * 2
        y.detach_()
    assert mode.kept.requires_grad


@compiled_below_a_mode
@limit
def test_a_whole_graph_takes_what_was_never_asked_before():
    with vt.track(views="full"):
        with _kept_piece(lambda t: t[1:])() as mode:
            torch.ones(4, requires_grad=True) * 2
        fn = torch.compile(torch.sin, backend="eager", fullgraph=True)
        assert _succeeds(lambda: fn(mode.kept))
