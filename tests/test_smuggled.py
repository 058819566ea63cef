import pytest
import torch
from caches import MM, HandOut, Keep, aten, detached
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from viewtrack import track
from viewtrack.report import Recorder
from viewtrack.smuggled import brief


def hazards(run, *args):
    with Recorder() as recorder:
        run(*args)
    return [row.hazard for row in recorder.report("test").hazards]


def marked_line(mark):
    with open(__file__) as file:
        [line] = [number for number, text in enumerate(file, 1) if text.endswith(f"# {mark}\n")]
    return line


X = torch.full((4, 4), 2.0)


def product():
    return X @ X  # the product


def keep_write_hand_out(write, how=detached, again=lambda t: t):
    keep = Keep(how)
    with keep:
        out = product()
    write(out)
    with HandOut(keep, again):
        return product()


def mul(t):
    t.mul_(3)  # the write


# ------------------------------------------------------------------------------ what is a hazard


def test_a_hazard_names_what_was_kept_and_who_wrote():
    [hazard] = hazards(keep_write_hand_out, mul)
    assert (hazard.op, hazard.result, hazard.keeper) == ("aten.mm.default", "f32[4, 4]", "Keep")
    assert hazard.use == "by HandOut in place of aten.mm.default"
    for site in (hazard.saved, hazard.used):
        assert (site.filename, site.function) == (__file__, "product")
        assert site.lineno == marked_line("the product")
    [write] = hazard.writes
    assert (write.op, write.argument, write.function) == ("aten.mul_.Tensor", "self", "mul")
    assert write.lineno == marked_line("the write")
    assert (write.version_before, write.version_after) == (0, 1)


def test_a_hazard_tells_of_an_alias_that_no_schema_tells_of():
    def linear(write):
        keep, layer, x = Keep(detached), torch.nn.Linear(4, 4, bias=False), torch.ones(2, 3, 4)
        with torch.no_grad():
            with keep:
                out = layer(x)
            write(out)
            with HandOut(keep):
                layer(x)

    [hazard] = hazards(linear, lambda t: t.relu_())
    assert hazard.through == ("aten._unsafe_view.default",)
    [hazard] = hazards(keep_write_hand_out, lambda t: aten._unsafe_view(t, (16,)).sin_())
    assert hazard.through == ("aten._unsafe_view.default",)
    [hazard] = hazards(keep_write_hand_out, lambda t: t.view(16).sin_())
    assert hazard.through == ("",)


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda t: t.mul_(3), id="itself"),
        pytest.param(lambda t: t.view(-1).add_(1), id="view"),
        pytest.param(lambda t: t.t()[1:][:, 2:].zero_(), id="view-of-view"),
        pytest.param(lambda t: t.detach().relu_(), id="detach"),
        pytest.param(lambda t: t.data.neg_(), id="data"),
        pytest.param(lambda t: aten._unsafe_view(t, (16,)).sin_(), id="_unsafe_view"),
        pytest.param(lambda t: t.__setitem__((0, 0), 7.0), id="setitem"),
        pytest.param(lambda t: torch.mul(X, 2, out=t), id="out"),
        pytest.param(lambda t: torch._foreach_mul_([t], 3.0), id="foreach"),
        pytest.param(lambda t: t.copy_(X), id="copy_"),
    ],
)
def test_every_declared_way_to_write(write):
    [hazard] = hazards(keep_write_hand_out, write)
    assert len(hazard.writes) == 1


@pytest.mark.parametrize(
    ("how", "again"),
    [
        pytest.param(lambda t: t, lambda t: t, id="the-result-itself"),
        pytest.param(lambda t: t.view_as(t), lambda t: t, id="view"),
        pytest.param(lambda t: t.data, lambda t: t, id="data"),
        pytest.param(detached, lambda t: t.detach(), id="alias-again"),
        pytest.param(detached, lambda t: t.clone(), id="copy-made-too-late"),
        pytest.param(detached, lambda t: t * 2 / 2, id="computed-from-it"),
        pytest.param(lambda t: t, lambda t: t.clone(), id="result-copied-too-late"),
    ],
)
def test_every_way_to_keep(how, again):
    [hazard] = hazards(keep_write_hand_out, mul, how, again)
    assert hazard.op == "aten.mm.default"
    assert [write.op for write in hazard.writes] == ["aten.mul_.Tensor"]


def test_a_memoised_factory():
    class Memo(TorchDispatchMode):
        kept = None

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is not aten.arange.default:
                return func(*args, **(kwargs or {}))
            if self.kept is None:
                self.kept = func(*args, **(kwargs or {}))
            return self.kept

    def run():
        with Memo():
            torch.arange(3).add_(1)
            torch.arange(3)

    [hazard] = hazards(run)
    assert (hazard.op, hazard.result) == ("aten.arange.default", "i64[3]")


def test_one_mode_for_both_phases():
    class Cache(TorchDispatchMode):
        again, kept = False, None

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is MM and self.again:
                return self.kept.clone()
            out = func(*args, **(kwargs or {}))
            if func is MM:
                self.kept = out.detach()
            return out

    def run():
        with Cache() as cache:
            product().mul_(3)
            cache.again = True
            product()

    [hazard] = hazards(run)
    assert (hazard.keeper, hazard.use) == ("Cache", "by Cache in place of aten.mm.default")


def test_it_is_told_once_below_other_modes():
    def run():
        keep = Keep(detached)
        with Keep(detached, op=None), keep, Keep(detached, op=None):
            out = product()
        mul(out)
        with Keep(detached, op=None), HandOut(keep), Keep(detached, op=None):
            product()

    with Recorder() as recorder:
        run()
    [row] = recorder.report("test").hazards
    assert row.count == 1
    assert row.hazard.saved.lineno == marked_line("the product")


def test_a_write_in_another_modes_handler():
    class Clamp(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is MM:
                out.clamp_(max=1)  # in a handler
            return out

    def run():
        keep = Keep(detached)
        with Clamp(), keep:
            product()
        with Clamp(), HandOut(keep):
            product()

    # `Keep` is above: it keeps what `Clamp` has clamped.
    assert hazards(run) == []

    def run_the_other_way():
        keep = Keep(detached)
        with keep, Clamp():
            product()
        with HandOut(keep):
            product()

    [hazard] = hazards(run_the_other_way)
    assert hazard.writes[0].lineno == marked_line("in a handler")


def test_an_input_that_was_kept_is_known_by_the_op_that_made_it():
    class KeepInput(Keep):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is aten.sin.default:
                self.kept.append(args[0].detach())
            return func(*args, **(kwargs or {}))

    def run():
        keep = KeepInput(detached)
        with keep:
            out = product()
            out.sin()
        mul(out)
        with HandOut(keep):
            product()

    [hazard] = hazards(run)
    assert (hazard.op, hazard.keeper) == ("aten.mm.default", "KeepInput")
    assert hazard.saved.lineno == marked_line("the product")


def test_the_writes_since_it_was_kept_and_no_others():
    def run():
        keep = Keep(detached)
        with keep:
            out = product()
        out.mul_(3)
        out.add_(1)
        with HandOut(keep):
            again = product()
        again.neg_()

    [hazard] = hazards(run)
    assert [write.op for write in hazard.writes] == ["aten.mul_.Tensor", "aten.add_.Tensor"]


# ------------------------------------------------------------------------------ what is none


@pytest.mark.parametrize(
    ("write", "how"),
    [
        pytest.param(lambda t: None, detached, id="no-write"),
        pytest.param(lambda t: t.mul(3).add_(1), detached, id="write-to-another"),
        pytest.param(mul, torch.clone, id="kept-as-a-copy"),
        pytest.param(lambda t: t[:2].zero_(), lambda t: t[2:].detach(), id="disjoint-rows"),
        pytest.param(
            lambda t: t[:, 1:].zero_(), lambda t: t.detach()[:, :1], id="disjoint-columns"
        ),
    ],
)
def test_kept_and_not_written(write, how):
    assert hazards(keep_write_hand_out, write, how) == []


def test_kept_and_written_and_not_used():
    def run():
        with Keep(detached):
            mul(product())
            product()

    assert hazards(run) == []


def test_a_mode_that_looks_at_what_it_kept_and_runs_the_op():
    class Norms(TorchDispatchMode):
        last, norms = None, ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if self.last is not None:
                self.norms += (self.last.norm(),)
            out = func(*args, **(kwargs or {}))
            self.last = out.detach() if isinstance(out, torch.Tensor) else None
            return out

    def run():
        with Norms():
            for _ in range(3):
                mul(product())
                product()

    assert hazards(run) == []


def test_a_mode_that_hands_up_an_alias_of_every_result():
    class Detach(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func._schema.is_mutable or not isinstance(out, torch.Tensor):
                return out
            return out.detach()

    def run():
        with Detach():
            x = X * 1
            row, flat = x[0], x.view(-1)
            x.add_(1)
            (row + 1).relu_()
            flat.mul_(2)
            assert float(x.sum() + row.sum()) == 6 * 20

    assert hazards(run) == []


def test_an_inplace_op_looked_at_before_and_after():
    class Compare(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            before = args[0].detach() if args and isinstance(args[0], torch.Tensor) else None
            out = func(*args, **(kwargs or {}))
            if before is not None:
                before.eq(out if isinstance(out, torch.Tensor) else out[0])
            return out

    def run():
        with Compare():
            (X * 1).mul_(3).add_(2)

    assert hazards(run) == []


def test_a_mode_that_writes_what_it_keeps_knows_of_it():
    class Buffer(TorchDispatchMode):
        kept = None

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is not MM:
                return func(*args, **(kwargs or {}))
            if self.kept is None:
                self.kept = X * 1
            torch.add(*args, out=self.kept)
            return self.kept

    def run():
        with Buffer():
            product()
            product()

    assert hazards(run) == []


class Pool(TorchDispatchMode):
    """Answers `mm` from a buffer that it keeps, filled by `fill`."""

    def __init__(self, fill):
        super().__init__()
        self.fill, self.buffer = fill, None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not MM:
            return func(*args, **(kwargs or {}))
        if self.buffer is None:
            self.buffer = torch.zeros(4, 4)
        out = self.fill(self.buffer, *args)
        return self.buffer.detach() if out is None else out


def rectified_in_a_loop(fill, times=3):
    with torch.no_grad(), Pool(fill):
        for _ in range(times):
            product().relu_()


def add_out(buffer, a, b):
    torch.add(a, b, out=buffer)


def add_anew(buffer, a, b):
    buffer.zero_()
    buffer.add_(a).add_(b)


def add_into_rows(buffer, a, b):
    rows = buffer[1:3]
    torch.add(a[:2], b[:2], out=rows)
    return rows


@pytest.mark.parametrize("fill", [add_out, add_anew, add_into_rows])
def test_a_pool_that_fills_its_buffer_anew(fill):
    assert hazards(rectified_in_a_loop, fill) == []


def add_to_old(buffer, a, b):
    buffer.add_(a)


def add_to_old_by_out(buffer, a, b):
    torch.add(buffer, a, out=buffer)


def add_partly(buffer, a, b):
    torch.add(a[:2], b[:2], out=buffer[:2])


@pytest.mark.parametrize("fill", [add_to_old, add_to_old_by_out, add_partly])
def test_a_pool_that_leaves_of_what_was_there(fill):
    hazard, *others = hazards(rectified_in_a_loop, fill)
    assert others == []  # though one more write is found each time
    assert {write.op for write in hazard.writes} == {"aten.relu_.default"}


def test_a_pool_that_fills_its_buffer_in_parts_by_one_op():
    def run():
        with Pool(lambda buffer, a, b: torch._foreach_add_(list(buffer.split(2)), 1.0) and None):
            product()
            product()

    assert hazards(run) == []  # nobody else writes


def test_a_pool_that_is_written_after_it_was_filled():
    def once(buffer, a, b):
        if buffer.sum() == 0:
            torch.add(a, b, out=buffer)

    [hazard] = hazards(rectified_in_a_loop, once)
    assert [write.op for write in hazard.writes] == ["aten.relu_.default"]


def test_memory_without_content_from_a_pool():
    class Pool(TorchDispatchMode):
        kept = None

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is not aten.empty.memory_format:
                return func(*args, **(kwargs or {}))
            if self.kept is None:
                self.kept = func(*args, **(kwargs or {}))
            return self.kept

    def run():
        with Pool():
            torch.empty(3).fill_(1)
            torch.empty(3).fill_(2)

    assert hazards(run) == []


def test_a_memoised_view_of_an_argument():
    class Views(TorchDispatchMode):
        kept = None

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is not aten.t.default:
                return func(*args, **(kwargs or {}))
            if self.kept is None:
                self.kept = func(*args, **(kwargs or {}))
            return self.kept.detach()

    def run():
        x = X * 1
        with Views():
            x.t()
            x.add_(1)
            x.t()

    assert hazards(run) == []


def test_a_handler_that_decomposes():
    class Decompose(TorchDispatchMode):
        bias = None

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is not aten.addmm.default:
                return func(*args, **(kwargs or {}))
            if self.bias is None:
                self.bias = args[0].detach()
            return torch.mm(*args[1:]) + self.bias

    def run():
        bias = torch.ones(4)
        with Decompose():
            for _ in range(2):
                torch.addmm(bias, X, X)
                bias.add_(1)

    assert hazards(run) == []


def test_a_handler_that_reads_what_it_kept_of_another_op():
    class Scale(TorchDispatchMode):
        """Answers `neg` with a product by the weight that it saw transposed."""

        weight = None

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is aten.t.default:
                self.weight = args[0].detach()
            if func is aten.neg.default:
                return args[0] * self.weight
            return func(*args, **(kwargs or {}))

    def run():
        weight = torch.ones(4, 4)
        with Scale():
            weight.t()
            for _ in range(2):
                X.neg()
                weight.add_(1)

    assert hazards(run) == []


def test_a_handler_that_decomposes_above_one_that_writes():
    class Double(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return args[0] * 2 if func is aten.neg.default else func(*args, **(kwargs or {}))

    class Clamp(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out.clamp_(max=1) if func is aten.mul.Tensor else out

    def run():
        with Clamp(), Double():
            X.neg()

    assert hazards(run) == []


def test_a_program_with_inplace_ops_and_no_mode():
    def run():
        layer = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            torch.relu_(layer(X)).sum().backward()
            optimizer.step()

    assert hazards(run) == []


# ------------------------------------------------------------------------------ checkpointing


def policy(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is MM else CheckpointPolicy.PREFER_RECOMPUTE


def selective(allow):
    return lambda: create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation=allow)


def handmade():
    keep = Keep(detached)
    return keep, HandOut(keep)


def gradient(context_fn, inplace):
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4, bias=False)

    def block(x):
        h = layer(x)  # kept
        return torch.nn.functional.silu(h, inplace=inplace).sin()  # written

    x = torch.randn(2, 3, 4, requires_grad=True)
    kwargs = {} if context_fn is None else {"context_fn": context_fn}
    checkpoint(block, x, use_reentrant=False, **kwargs).sum().backward()
    return x.grad


@pytest.mark.parametrize("context_fn", [handmade, selective(True)], ids=["handmade", "torch"])
def test_an_inplace_activation_spoils_a_checkpoint_cache(context_fn):
    with Recorder() as recorder:
        spoilt = gradient(context_fn, inplace=True)
    assert not torch.allclose(spoilt, gradient(None, inplace=True))
    [row] = recorder.report("test").hazards  # and none of what the recompute saved again
    assert (row.count, row.hazard.op) == (1, "aten.mm.default")
    assert row.hazard.saved.lineno == marked_line("kept")
    assert {write.lineno for write in row.hazard.writes} == {marked_line("written")}


@pytest.mark.parametrize(
    "context_fn",
    [None, handmade, selective(True), selective(False)],
    ids=["plain", "handmade", "torch", "torch-checking"],
)
def test_a_checkpoint_without_the_fault(context_fn):
    with Recorder() as recorder:
        tracked = gradient(context_fn, inplace=False)
    assert recorder.report("test").hazards == ()
    assert torch.equal(tracked, gradient(context_fn, inplace=False))


def test_a_check_of_the_cache_itself_is_explained():
    with Recorder() as recorder, track(), pytest.raises(RuntimeError, match="has been mutated"):
        gradient(selective(False), inplace=True)
    [row] = recorder.report("test").hazards
    assert row.hazard.saved.lineno == marked_line("kept")
    assert row.hazard.writes[0].lineno == marked_line("written")
    assert "but it raised RuntimeError: " in row.hazard.use


def test_an_error_that_has_nothing_to_do_with_it():
    class Refuse(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is aten.sin.default:
                raise RuntimeError("no sine")
            return func(*args, **(kwargs or {}))

    with Recorder() as recorder, Keep(detached), Refuse():
        out = product()
        mul(out)
        with pytest.raises(RuntimeError, match="no sine"):
            out.sin()
    assert recorder.report("test").hazards == ()


def test_an_error_after_the_op_was_run():
    class Verify(HandOut):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is MM:
                kept = self.keep.kept.popleft()
                raise ArithmeticError(f"not what it was: {kept.shape}")
            return out

    def run():
        keep = Keep(detached)
        with keep:
            mul(product())
        with Verify(keep), pytest.raises(ArithmeticError):
            product()

    assert hazards(run) == []


# ------------------------------------------------------------------------------ what stays behind


def test_nothing_is_held_alive():
    import weakref

    with Recorder(), Keep(detached) as keep:
        out = product()
        storages = [weakref.ref(t.untyped_storage()) for t in (out, keep.kept[0])]
        keep.kept.clear()
        del out
        assert [ref() for ref in storages] == [None, None]


@pytest.mark.parametrize(
    ("t", "want"),
    [
        (torch.zeros(2, 3), "f32[2, 3]"),
        (torch.zeros((), dtype=torch.bfloat16), "bf16[]"),
        (torch.zeros(1, dtype=torch.complex64), "c64[1]"),
        (torch.zeros(1, dtype=torch.uint8), "u8[1]"),
        (torch.zeros(1, dtype=torch.bool), "bool[1]"),
    ],
)
def test_brief(t, want):
    assert brief(t) == want
