"""The calls of torch's OpInfo database, made on `TrackedTensor`s and on the tensors inside them."""

import re
from dataclasses import dataclass, field, replace

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import viewtrack as vt
from viewtrack.testing.compare import Difference, differences, is_steady
from viewtrack.testing.observation import observe
from viewtrack.testing.opinfo import calls, database

# What differs, by op and by what differs, and why it must. All but the first come of C++ code that
# asks `isTensorSubclassLike` and then goes another way, for any wrapper subclass whatever.
EXCEPTIONS = [
    (
        r".* in-place on a view",
        r"\w+\[\d+\]\.grad_fn",
        "native replays a view of a wrapper by its own op and not by as_strided, "
        "since support_as_strided() is false for all of them",
    ),
    (
        r".*",
        r"\w+\[\d+\]\.grad_fn: ReshapeAliasBackward0",
        "reshape of a wrapper goes by view and not by _reshape_alias",
    ),
    (
        r"addbmm in-place on a view",
        r"grad(\[\d+\])?",
        "on stock torch backward through a view that the op has grown fails, by as_strided",
    ),
    (
        r"nn\.functional\.(dropout|feature_alpha_dropout|alpha_dropout).* in-place on a view",
        r"grad(\[\d+\])?",
        "backward through unsqueeze, a write and squeeze on a view fails for every wrapper, since "
        "native replays the views (TwoTensor too)",
    ),
    (
        r"tensor_split",
        r".*",
        "reads a tensor of indices in C++, which says that a wrapper has no memory",
    ),
    (
        r"linalg\.matrix_rank.*",
        r"\w+\[\d+\]\.(_version|value)",
        "torch sets a local variable instead of the out= tensor if any is of a subclass",
    ),
    (
        r"nn\.functional\.(one_hot|linear_cross_entropy).*",
        r"out\[\d+\]\._version",
        "torch makes the result without writing it in place if any tensor is of a subclass",
    ),
    (
        r"linalg\.eigh?|(masked\.)?prod|cumprod|masked_fill|linalg\.(cond|norm.*|svdvals|matrix_norm)|norm\.nuc.*",
        r"grad(\[\d+\])?|\w+\[\d+\]\.value",
        "torch takes another formula, or leaves out a check of values, for a subclass",
    ),
    (
        r"matmul out",
        r"\w+\[\d+\]\.value",
        "torch folds the batch into one mm for a subclass, where out= otherwise makes it use bmm",
    ),
    (
        r"nn\.functional\.ctc_loss",
        r"out\[\d+\]\.grad_fn",
        "torch takes the overload for lengths in tensors if any tensor is of a subclass",
    ),
    (
        r"sparse\..*|to_sparse",
        r"\w+\[\d+\]\.stride",
        "a wrapper shows strides where a compressed sparse tensor refuses to",
    ),
]


@dataclass
class Findings:
    """What a sweep found, and how much it looked at."""

    calls: int = 0
    differences: list[Difference] = field(default_factory=list)
    explained: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def add(self, call, found):
        self.calls += 1
        for difference in found:
            reason = why(call, difference)
            if reason is None:
                self.differences.append(difference)
            else:
                self.explained[reason] = self.explained.get(reason, 0) + 1


def why(call, difference):
    """The listed reason for a difference, if there is one."""
    op = call.name.split("[")[0]
    name = f"{op} {call.variant}"
    what = difference.what
    if "ReshapeAlias" in str(difference.expected):
        what += ": ReshapeAliasBackward0"
    for ops, whats, reason in EXCEPTIONS:
        if (re.fullmatch(ops, op) or re.fullmatch(ops, name)) and re.fullmatch(whats, what):
            return reason
    return None


def wrapped(call, wrapper=vt.TrackedTensor, apart=None):
    """The same call on wrapped tensors; where counters disagree after it is noted in `apart`."""

    def fn(*args, **kwargs):
        out = call.fn(*args, **kwargs)
        for t in tree_leaves((args, kwargs, out)):
            if isinstance(t, vt.TrackedTensor) and vt.version(t) != vt.version(t.unwrap()):
                (apart if apart is not None else []).append((vt.version(t), vt.version(t.unwrap())))
        return out

    args, kwargs = tree_map_only(torch.Tensor, wrapper, (call.args, call.kwargs))
    return replace(call, fn=fn, args=args, kwargs=kwargs)


def only_shows_wrappers(difference):
    """Whether two errors differ only in how they show the arguments."""
    texts = [
        re.sub(r"TrackedTensor\((tensor\(.*?\))\)", r"\1", str(error), flags=re.DOTALL).replace(
            "TrackedTensor", "Tensor"
        )
        for error in (difference.expected, difference.found)
    ]
    return difference.what == "error" and texts[0] == texts[1]


def compared(call, wrapper=vt.TrackedTensor):
    """How the call on wrapped tensors differs from the call on the tensors themselves."""
    expected = observe(call)
    apart = []

    def on_wrappers():
        return observe(wrapped(call, wrapper, apart))

    found = differences(call.name, expected, on_wrappers)
    found = [d for d in found if not (d.what.endswith(".type") or only_shows_wrappers(d))]
    found = [d for d in found if is_steady(call, d)]
    # Some kernels of LAPACK differ from themselves, in the last bit, once in a hundred calls.
    for _ in range(3 if found else 0):
        again = {d.what for d in differences(call.name, expected, on_wrappers)}
        found = [d for d in found if d.what in again]
    return found + [Difference(call.name, "inner counter", w, i) for w, i in apart]


def sweep(name_contains="", samples=None, every=1, start=0):
    findings = Findings()
    for op in database(name_contains)[start::every]:
        sweep_calls(calls(op, samples), findings)
    return findings


def sweep_calls(tried, findings):
    for call in tried:
        try:
            findings.add(call, compared(call))
        except Exception as error:
            findings.failed.append(f"{call.name}: {type(error).__name__}: {error}")
