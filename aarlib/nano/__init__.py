"""The bundled nano model and the world it was trained on."""

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"
"""The Hugging Face folder of the bundled model."""
