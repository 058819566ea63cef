"""Selective checkpointing whose cache cannot be overwritten unseen.

`create_selective_checkpoint_contexts` stands in for torch's own.
"""

from .create import create_selective_checkpoint_contexts

__all__ = ["create_selective_checkpoint_contexts"]
