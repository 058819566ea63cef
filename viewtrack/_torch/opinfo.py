"""Private torch: the table of ops that torch's own tests run over.

A part of the one room that touches private torch; tried on torch 2.6.0, 2.9.1, 2.13.0 and 2.14.1.
"""

from __future__ import annotations

from typing import Any


def op_database() -> list[Any]:
    """The OpInfo database with its foreach entries; importing it needs numpy and expecttest."""
    from torch.testing._internal import common_methods_invocations as invocations

    foreach = (getattr(invocations, n) for n in dir(invocations) if n.endswith("_op_db"))
    return [*invocations.op_db, *(op for entries in foreach for op in entries)]
