"""MutationGuard and protect: what they find or refuse, and what they leave alone."""

import ctypes
import gc
import threading
import weakref

import pytest
import torch
from write_ways import ALIASES, OPS, here, in_handler, in_tracked_thread, one_process_group

from viewtrack import MutatedTensorError, MutationGuard, guard_saved_tensors, protect, track
from viewtrack.checkpoint import create_selective_checkpoint_contexts


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory):
    with one_process_group(tmp_path_factory.mktemp("gloo") / "store"):
        yield


def test_what_was_not_written_is_given_back():
    t = torch.ones(4, requires_grad=True) * 2
    with MutationGuard() as guard:
        entry = guard.save(t)
        (t * 3).sum().backward()
        assert entry.get() is t


def test_a_write_is_told_with_both_lines():
    t = torch.ones(4, 4)
    with MutationGuard() as guard:
        entry = guard.save(t, "weights")
        t[0].mul_(2)
        with pytest.raises(MutatedTensorError, match="has been mutated") as caught:
            entry.get()
        entry.release()
    error = caught.value
    assert (error.saved.op, error.saved.shape, error.saved.dtype) == (
        "weights",
        (4, 4),
        torch.float32,
    )
    assert (error.saved.filename, error.saved.function) == (
        __file__,
        "test_a_write_is_told_with_both_lines",
    )
    (write,) = error.writes
    assert (write.op, write.argument, write.filename) == ("aten.mul_.Tensor", "self", __file__)
    assert write.lineno == error.saved.lineno + 1
    assert (write.version_before, write.version_after) == (0, 1)


def test_leaving_checks_all_and_lists_all():
    a, b, c = torch.ones(2), torch.ones(3), torch.ones(4)

    def body():
        with MutationGuard() as guard:
            for t, label in ((a, "a"), (b, "b"), (c, "c")):
                guard.save(t, label)
            a.add_(1)
            c.data.sub_(1)

    with pytest.raises(MutatedTensorError) as caught:
        body()
    assert [write.op for write in caught.value.writes] == ["aten.add_.Tensor", "aten.sub_.Tensor"]
    assert "b -> f32[3]" not in str(caught.value)


def test_an_error_in_the_block_is_not_hidden():
    t = torch.ones(2)

    def body():
        with MutationGuard() as guard:
            guard.save(t)
            t.add_(1)
            raise KeyError

    with pytest.raises(KeyError):
        body()


def test_without_entering_it_the_counter_still_tells():
    t = torch.ones(4)
    entry = MutationGuard().save(t)
    assert entry.get() is t
    t.view(2, 2).mul_(2)
    with pytest.raises(MutatedTensorError, match=r"by an op that no mode saw, version 0 -> 1"):
        entry.get()


def test_a_neighbour_in_the_buffer_may_be_written():
    buffer = torch.ones(8)
    guard = MutationGuard()
    entry = guard.save(buffer[:4])
    buffer[4:].mul_(2)
    with guard, track():
        buffer[4:].mul_(2)
        assert entry.get().tolist() == [1.0] * 4


CHANGES = {
    "aten.set_.source_Tensor": lambda t: t.set_(torch.zeros(4, 4)),
    "aten.resize_.default": lambda t: t.resize_(2),
    "aten.t_.default": lambda t: t.t_(),
    "aten.unsqueeze_.default": lambda t: t.unsqueeze_(0),
}


def give_data(t):
    t.data = torch.zeros(4, 4)


@pytest.mark.parametrize("exchange", [*CHANGES.values(), give_data], ids=[*CHANGES, "data"])
def test_another_storage_or_geometry_is_a_mutation(exchange):
    t = torch.ones(4, 4)
    t[0, 1] = 3
    entry = MutationGuard().save(t)
    exchange(t)
    if t.shape == (4, 4) and t.is_contiguous():
        assert not torch.equal(t, torch.ones(4, 4))
    with pytest.raises(MutatedTensorError, match="an exchange of its storage or sizes"):
        entry.get()


@pytest.mark.parametrize("op", CHANGES)
def test_a_change_of_storage_or_geometry_is_told_with_its_line(op):
    t, other = torch.ones(4, 4), torch.ones(4, 4)
    guard = MutationGuard()
    entry = guard.save(t)
    with track():
        CHANGES[op](t.detach())  # which leaves t as it is
        assert entry.get() is t
        CHANGES[op](t)
        CHANGES[op](other)
    with pytest.raises(MutatedTensorError) as caught:
        guard.check()
    (write,) = caught.value.writes
    assert (write.op, write.lineno) == (op, CHANGES[op].__code__.co_firstlineno)
    t = torch.ones(4, 4)
    with MutationGuard(allow=[op]) as guard:
        guard.save(t)
        CHANGES[op](t)


def test_content_level_sees_raw_writes_and_minds_no_equal_bytes():
    t = torch.ones(4)
    with MutationGuard(check="content") as guard:
        entry = guard.save(t)
        t.mul_(1)
        assert entry.get() is t
        ctypes.memset(t.data_ptr(), 0, 4)
        with pytest.raises(MutatedTensorError):
            entry.get()
        entry.release()


def test_allowed_ops_may_write():
    t = torch.ones(4)
    with MutationGuard(allow={torch.ops.aten.relu_.default: "idempotent", "aten.abs_": ""}) as g:
        entry = g.save(t)
        t.relu_()
        t.abs_()
        assert entry.get() is t


def test_released_means_released():
    t = torch.ones(4)
    died = weakref.ref(t)
    guard = MutationGuard()
    entry = guard.save(t)
    entry.release()
    with pytest.raises(ValueError, match="released"):
        entry.get()
    t.add_(1)
    guard.check()
    del t
    gc.collect()
    assert died() is None


@pytest.mark.parametrize("level", ["bytes", "off", ""])
def test_the_level_is_checked(level):
    with pytest.raises(ValueError, match="`check` must be"):
        MutationGuard(check=level)


def test_a_wrapper_is_watched_through_to_its_parts():
    two_tensor = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    a, b = torch.ones(3), torch.ones(3)
    t = two_tensor(a, b)
    with MutationGuard() as guard:
        entry = guard.save(t)
        assert entry.get() is t
        b.add_(1)
        with pytest.raises(MutatedTensorError) as caught:
            entry.get()
        entry.release()
    assert caught.value.writes[0].op == "aten.add_.Tensor"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_jagged_nested_tensor_is_written_while_something_is_guarded():
    """To look for watches the tracker asks the tensor for its layout, which is an op as well."""
    parts = [torch.zeros(2), torch.zeros(3)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    with MutationGuard() as guard:
        guard.save(torch.ones(4))
        nested.add_(1)
        nested.values().mul_(2)
        nested.zero_()
        nested.add_(1)
    assert nested.values().tolist() == [1.0] * 5
    assert nested._version == 4


# protect


def test_nothing_is_written_and_the_line_raises():
    t = torch.ones(4)
    with protect(t):
        with pytest.raises(MutatedTensorError, match="nothing has been mutated yet") as caught:
            t.view(2, 2)[1].mul_(5)
        assert caught.traceback[0].path.name == "test_guard.py"
    assert t.tolist() == [1.0] * 4
    assert t._version == 0
    t.mul_(5)
    assert t.tolist() == [5.0] * 4


@pytest.mark.parametrize("place", [here, in_handler], ids=["here", "in_handler"])
@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("op", [op for op in OPS if op.seen], ids=lambda op: op.name)
def test_every_write_that_a_mode_sees_is_refused(op, alias, place):
    buffer = torch.ones(8)
    with protect(buffer[:4]):
        with pytest.raises(MutatedTensorError):
            place(lambda: op.write(ALIASES[alias](buffer[:4])))
        assert buffer.tolist() == [1.0] * 8
        place(lambda: op.write(ALIASES[alias](buffer[4:])))
        assert buffer[:4].tolist() == [1.0] * 4
        assert buffer[4:].tolist() != [1.0] * 4


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_storage_or_geometry_is_refused(change):
    t = torch.arange(16.0).view(4, 4)
    with protect(t):
        with pytest.raises(MutatedTensorError, match="nothing has been mutated yet"):
            change(t)
        change(t.detach())  # no byte of t, nor its sizes
    assert torch.equal(t, torch.arange(16.0).view(4, 4))


def test_a_saved_tensor_refuses_the_edit():
    y = torch.ones(2, requires_grad=True).exp()
    with protect(y), pytest.raises(MutatedTensorError):
        y.detach().view(-1).mul_(2)
    y.sum().backward()


def test_another_thread_is_refused_where_it_is_tracked():
    t = torch.ones(4)
    errors = []

    def write():
        try:
            t.add_(1)
        except MutatedTensorError as error:
            errors.append((threading.current_thread().name, error))

    with protect(t):
        in_tracked_thread(write)
    assert [name for name, _ in errors] == ["tracked"]
    assert t.tolist() == [1.0] * 4


def test_protection_ends_with_the_block_also_by_an_error():
    t = torch.ones(4)
    with pytest.raises(KeyError), protect(t):
        raise KeyError
    with track():
        t.add_(1)
    assert t.tolist() == [2.0] * 4


def csr():
    return torch.eye(4).to_sparse_csr()


def coo():
    return torch.eye(4).to_sparse()


SPARSE = [coo, csr, lambda: torch.eye(4).to_sparse_csc(), lambda: torch.eye(4).to_sparse_bsr(2)]
values_in = {torch.sparse_coo: lambda t: t._values()}
TO_SPARSE = {
    "itself": lambda t: t.mul_(2),
    "zero": lambda t: t.zero_(),
    "alias": lambda t: t.detach().neg_(),
    "values": lambda t: values_in.get(t.layout, lambda t: t.values())(t).mul_(2),
}


@pytest.mark.parametrize("make", SPARSE)
@pytest.mark.parametrize("write", TO_SPARSE)
def test_a_write_to_a_sparse_tensor_is_refused_and_named(make, write):
    t = make()
    with protect(t), pytest.raises(MutatedTensorError, match="nothing has been mutated") as caught:
        TO_SPARSE[write](t)
    assert t.to_dense().equal(torch.eye(4))
    assert [w.function for w in caught.value.writes] == ["<lambda>"]
    assert caught.value.writes[0].lineno == TO_SPARSE[write].__code__.co_firstlineno
    TO_SPARSE[write](t)
    assert not t.to_dense().equal(torch.eye(4))

    t = make()
    with MutationGuard() as guard:
        entry = guard.save(t)
        TO_SPARSE[write](t)
        with pytest.raises(MutatedTensorError) as caught:
            entry.get()
        entry.release()
    assert caught.value.writes[0].function == "<lambda>"


@pytest.mark.parametrize("make", SPARSE)
@pytest.mark.parametrize("check", ["storage", "content"])
def test_a_sparse_tensor_may_be_read(make, check):
    t = make()
    with protect(t), MutationGuard(check=check) as guard:
        guard.save(t)
        assert (t @ torch.ones(4, 1)).equal(torch.ones(4, 1))
        assert t.to_dense().mul_(2).equal(2 * torch.eye(4))
        assert t.clone().mul_(3).to_dense().equal(3 * torch.eye(4))


def test_a_write_to_an_opaque_tensor_is_refused():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch was built without mkldnn")
    t = torch.ones(4, 4).to_mkldnn()
    with protect(t), pytest.raises(MutatedTensorError, match="would write"):
        t.zero_()
    assert t.to_dense().equal(torch.ones(4, 4))
    t.zero_()
    assert t.to_dense().equal(torch.zeros(4, 4))


def test_the_error_of_a_refusal_names_the_op_and_the_line():
    t = torch.ones(4)
    with protect(t), pytest.raises(MutatedTensorError) as caught:
        torch._foreach_mul_([torch.ones(2), t[1:]], 2)
    (write,) = caught.value.writes
    assert (write.op, write.filename, write.function) == (
        "aten._foreach_mul_.Scalar",
        __file__,
        "test_the_error_of_a_refusal_names_the_op_and_the_line",
    )
    assert write.version_before == write.version_after == 0


@pytest.mark.parametrize("take", [lambda: MutationGuard().save(3), lambda: protect(3).__enter__()])
def test_only_tensors_can_be_guarded(take):
    with pytest.raises(TypeError, match="expected a tensor to guard, got int"):
        take()


TAKES_ALLOW = [
    lambda allow: MutationGuard(allow=allow),
    lambda allow: guard_saved_tensors(allow=allow).__enter__(),
    lambda allow: create_selective_checkpoint_contexts([], allow=allow),
]


@pytest.mark.parametrize("take", TAKES_ALLOW)
def test_what_is_allowed_must_be_ops(take):
    for allow in ("aten.relu_", 3, [3], [torch.relu_]):
        with pytest.raises(TypeError, match="`allow` takes"):
            take(allow)
    with pytest.raises(ValueError, match=r"did you mean 'aten\.relu_'"):
        take({"aten.relu__": "a typo"})


def test_ops_are_allowed_however_they_are_named():
    aten = torch.ops.aten
    for op in ("aten.mul_", "aten::mul_", "aten::mul_.Tensor", aten.mul_, aten.mul_.Tensor):
        t = torch.ones(2)
        with MutationGuard(allow=[op, "mylib.later_"]) as guard:
            guard.save(t)
            t.mul_(2)


def test_a_loop_does_not_crowd_out_another_write():
    t = torch.ones(2)
    with MutationGuard() as guard:
        entry = guard.save(t)
        for _ in range(100):
            t.mul_(1)
        t.sin_()
        t.mul_(1)
        with pytest.raises(MutatedTensorError, match="and 68 more writes") as caught:
            entry.get()
        entry.release()
    ops = [write.op for write in caught.value.writes]
    assert ops == ["aten.mul_.Tensor"] * 32 + ["aten.sin_.default", "aten.mul_.Tensor"]
