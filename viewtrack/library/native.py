"""Counting for torch's own ops that write and have no ADInplaceOrView kernel.

torchgen makes none for ``_fused_*`` and ``_foreach_*`` ops and for some that write to ``out=``. The
kernels of the latter often come down to native in-place ops, which count; in a fused kernel, on a
device that has one, and under any dispatch mode, nobody does. Only the missing kernel is
registered: autograd, functionalization and batching of these ops are torch's.
"""

from __future__ import annotations

from typing import Any

from .._torch import library as _torch_library
from ..errors import ViewTrackError
from ..info import version
from .call import Call, under_way
from .checks import count
from .kernels import Kernels, count_below

# These do not change what autograd may have saved.
_NO_WRITES = ("detach_", "record_stream", "shallow_copy_data_")


class NativeKernels(Kernels):
    """The kernels of an op of which autograd, and compilers, know all the rest."""

    def inplace_or_view(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """In the middle: redispatch and count."""
        spec = self.spec
        written = [t for _, t in spec.writes(args, kwargs)]
        before = [version(t) for t in written]
        call = Call(spec, spec.tensors(args, kwargs), args, kwargs, looks_inside=False)
        with call, _torch_library.below_inplace_or_view():
            out = spec.op.redispatch(keyset & _torch_library.after_inplace_or_view, *args, **kwargs)
        count(written, before)
        return out

    def bottom(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """Below: count what a handler issued."""
        spec = self.spec
        written = [t for _, t in spec.writes(args, kwargs)]
        before = [version(t) for t in written]
        out = spec.op.redispatch(keyset & _torch_library.after_backend_select, *args, **kwargs)
        if under_way(spec, spec.tensors(args, kwargs), args, kwargs) is None:
            count_below(spec, args, kwargs, written, before)
        return out


def check_can_count(plan: Any) -> None:
    """Refuse an op of torch's own whose writes must not be counted, or cannot.

    Raises:
        ViewTrackError: it writes nothing, or is neither in place nor out=.
    """
    where = f"viewtrack.library.register: `{plan.name}` is torch's own op"
    base_name = plan.qualified.partition("::")[2].partition(".")[0]
    if not plan.writes or base_name in _NO_WRITES:
        raise ViewTrackError(f"{where}, and it writes nothing: there is nothing to count")
    out = any(a.kwarg_only for a in plan.writes)
    if not (out or base_name.endswith("_")):
        raise ViewTrackError(
            f"{where}, neither in place nor out=: its Autograd kernel leaves no place to count "
            f"in, and may have saved what the op updates, as that of batch norm does; call "
            f"torch.autograd.graph.increment_version after it where that matters"
        )
