"""KV cache groups of a published model, from its Hugging Face ``config.json``.

Law: an architecture is a row of a table, never a branch. Layers that differ in window or kind of
state stand in groups of their own, each with its own spec; what a config does not say and its model
class does not supply is refused by the field's name, never guessed.
"""

from kvspec.models import catalogue
from kvspec.models.build import architectures, from_config

__all__ = [
    "architectures",
    "catalogue",
    "from_config",
]
