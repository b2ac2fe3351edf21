"""Build the KV cache groups of a published model from its Hugging Face ``config.json``.

Invariant: an architecture is a row of a table, never a branch in code. Layers with different
windows or kinds of state are in different groups. A size is never guessed: if neither the config
nor the row of the architecture has it, `SpecError` names the field.
"""

from kvspec.models import catalogue
from kvspec.models.build import architectures, from_config

__all__ = [
    "architectures",
    "catalogue",
    "from_config",
]
