"""The bundled nano model and the world it was trained on: `WEIGHTS` (its folder) and `conversations(split, rows)`."""

from pathlib import Path
from typing import TYPE_CHECKING

from aarlib.lazy import lazy_attributes

if TYPE_CHECKING:
    from aarlib.nano.world import conversations as conversations

WEIGHTS = Path(__file__).parent / "weights"
"""The Hugging Face folder of the bundled model."""

__getattr__, __dir__ = lazy_attributes(__name__, {"conversations": "aarlib.nano.world"})
