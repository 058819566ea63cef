"""Selective checkpointing whose cache cannot be overwritten unseen.

`create_selective_checkpoint_contexts` stands in for torch's own. `guard` watches over a context_fn
that somebody else made. `install` puts the first in torch's place for a whole program.
"""

from .create import create_selective_checkpoint_contexts
from .foreign import guard
from .installing import install, uninstall

__all__ = ["create_selective_checkpoint_contexts", "guard", "install", "uninstall"]
