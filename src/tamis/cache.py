"""Where tamis keeps what it fetched or compiled."""

import os
from pathlib import Path

from tamis.errors import DownloadError


def cache_dir() -> Path:
    """$TAMIS_CACHE, else $XDG_CACHE_HOME/tamis, else ~/.cache/tamis. Raises DownloadError where there is no home."""
    try:
        if own := os.environ.get("TAMIS_CACHE"):
            return Path(own).expanduser().absolute()
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        # A relative XDG_CACHE_HOME is to be ignored, says the XDG base directory specification.
        return (base if base.is_absolute() else Path.home() / ".cache") / "tamis"
    except RuntimeError as error:
        raise DownloadError(f"no cache directory: {error}; set TAMIS_CACHE") from None
