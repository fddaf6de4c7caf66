from datetime import UTC, datetime
from importlib.metadata import version

__version__ = "0.1.0"


def made_with() -> dict[str, str]:
    """What stands in a file of results: the date (UTC) and the versions whose code made it."""
    packages = {name: version(name) for name in ("torch", "transformers")}
    return {"date": datetime.now(UTC).isoformat(timespec="minutes"), "aarlib": __version__, **packages}
