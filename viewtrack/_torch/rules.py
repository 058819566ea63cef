"""Where torch looks for the handler that a mode or subclass has for one op. Private torch.

Under the rules of the package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._library import simple_registry

find_rule: Callable[[Any, type], Any] = simple_registry.find_torch_dispatch_rule
"""What C++ calls for each op with the OpOverload and the class of what has the handler.

Relies on C++ keeping hold of the function, and calling what it returns in place of the class's
``__torch_dispatch__``, with the mode or the class of the subclass first.
"""


def rules_of(op: Any) -> dict[type, Any]:
    """The rules of an OpOverload, by class, as they come and go."""
    return simple_registry.singleton.find(op.__qualname__).torch_dispatch_rules._data
