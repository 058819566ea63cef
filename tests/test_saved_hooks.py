import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from viewtrack.report import Recorder


def hazards(run):
    with Recorder() as recorder:
        run()
    return [row.hazard for row in recorder.report("test").hazards]


def marked_line(mark):
    with open(__file__) as file:
        [line] = [number for number, text in enumerate(file, 1) if text.endswith(f"# {mark}\n")]
    return line


def pack(t):
    return t.detach()


def unpack(t):
    return t


def save_write_backward(hooks, write, *, by=4.0):
    """The gradient of `w * x`, where x is written between forward and backward."""
    w = torch.ones(4, requires_grad=True)
    x = torch.full((4,), by)
    with hooks:
        y = w * x  # saved
    write(x)
    y.sum().backward()  # used
    return w.grad


def add(x):
    x.add_(1)  # written


def test_without_hooks_autograd_refuses():
    with Recorder() as recorder, pytest.raises(RuntimeError, match="modified by an inplace"):
        save_write_backward(torch.enable_grad(), add)
    assert recorder.report("test").hazards == ()


def test_a_hazard_names_the_three_lines():
    def run():
        grad = save_write_backward(saved_tensors_hooks(pack, unpack), add)
        assert grad.tolist() == [5.0] * 4  # and not 4, as it should be

    [hazard] = hazards(run)
    assert (hazard.op, hazard.result, hazard.keeper) == ("", "f32[4]", "pack")
    assert hazard.saved.lineno == marked_line("saved")
    assert hazard.used.lineno == marked_line("used")
    [write] = hazard.writes
    assert (write.op, write.lineno) == ("aten.add_.Tensor", marked_line("written"))


@pytest.mark.parametrize(
    ("hooks", "keeper"),
    [
        pytest.param(lambda: saved_tensors_hooks(lambda t: t.data, unpack), "<lambda>", id="data"),
        pytest.param(
            lambda: saved_tensors_hooks(lambda t: (t,), lambda p: p[0]), "<lambda>", id="tuple"
        ),
        pytest.param(save_on_cpu, "save_on_cpu", id="save_on_cpu"),
    ],
)
def test_ways_to_keep(hooks, keeper):
    [hazard] = hazards(lambda: save_write_backward(hooks(), add))
    assert hazard.keeper == keeper


@pytest.mark.parametrize(
    ("hooks", "write"),
    [
        pytest.param((pack, unpack), lambda x: x.add(1), id="no-write"),
        pytest.param((torch.clone, unpack), add, id="a-copy-is-kept"),
        pytest.param((lambda t: t.tolist(), torch.tensor), add, id="no-tensor-is-kept"),
        pytest.param((pack, torch.clone), lambda x: None, id="copied-on-unpack"),
    ],
)
def test_what_is_no_hazard(hooks, write):
    def run():
        assert save_write_backward(saved_tensors_hooks(*hooks), write).tolist() == [4.0] * 4

    assert hazards(run) == []


def test_a_write_beside_what_was_saved():
    def run():
        w, x = torch.ones(2, requires_grad=True), torch.ones(4)
        x.mul_(2)  # before it was saved
        with saved_tensors_hooks(pack, unpack):
            y = w * x[:2]
        x[2:].zero_()
        y.sum().backward()

    assert hazards(run) == []


def test_allow_mutation_on_saved_tensors_is_no_hazard():
    def run():
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            assert save_write_backward(torch.enable_grad(), add).tolist() == [4.0] * 4

    assert hazards(run) == []


def test_what_a_checkpoint_reads_written_before_its_recompute():
    def run():
        x, scale = torch.ones(4, requires_grad=True), torch.full((4,), 4.0)
        y = checkpoint(lambda t: t * scale, x, use_reentrant=False)
        scale.add_(1)
        y.sum().backward()
        assert x.grad.tolist() == [5.0] * 4  # and not 4, as it should be

    [hazard] = hazards(run)
    assert hazard.keeper == "_checkpoint_hook"
    assert [write.op for write in hazard.writes] == ["aten.add_.Tensor"]


def test_a_write_through_an_alias_that_no_schema_tells_of():
    def run(alias):
        save_write_backward(saved_tensors_hooks(pack, unpack), lambda x: alias(x, (2, 2)).zero_())

    [hazard] = hazards(lambda: run(torch.ops.aten._unsafe_view))
    assert hazard.through == ("aten._unsafe_view.default",)
    [hazard] = hazards(lambda: run(torch.Tensor.view))
    assert hazard.through == ("",)


def test_attributes_of_a_hook_stay_visible(monkeypatch):
    def marked(t):
        return t

    marked.mark = "here"
    seen = []

    def enter(hooks):
        seen.append((hooks.pack_hook is not marked, hooks.pack_hook.mark))

    with monkeypatch.context() as patch:
        patch.setattr(saved_tensors_hooks, "__enter__", enter)
        patch.setattr(saved_tensors_hooks, "__exit__", lambda *_: None)
        with Recorder(), saved_tensors_hooks(marked, unpack):
            pass
    assert seen == [(True, "here")]


def test_hooks_are_left_as_they_were():
    own = saved_tensors_hooks(pack, unpack)
    enter = saved_tensors_hooks.__enter__
    with pytest.raises(ZeroDivisionError), Recorder(), own:
        raise ZeroDivisionError(saved_tensors_hooks.__enter__ is enter)
    assert saved_tensors_hooks.__enter__ is enter
    assert (own.pack_hook, own.unpack_hook) == (pack, unpack)


def test_compiled_code_has_its_own_hooks():
    x = torch.randn(4, requires_grad=True)

    @torch.compile(backend="aot_eager")
    def f(x):
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            return x.exp().sum()

    with Recorder() as recorder:
        f(x).backward()
    assert torch.equal(x.grad, x.detach().exp())
    assert recorder.report("test").hazards == ()
