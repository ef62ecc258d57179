"""Where compiled kernels are kept, and how processes that compile at the same time share the place.

Numba takes a compiled kernel from its cache unless the kernel's own file changed; a change in a file that the kernel's
file imports goes unnoticed. So the cache of each version of these sources has a directory of its own.

Numba names a kernel's code in an index and writes the code afterwards, without a lock: of two processes that compile
two kernels from one function each may give the other's name to its own, and a third one runs the wrong code.
"""

import contextlib
import fcntl
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
from numba.core import caching

from tamis.cache import cache_dir
from tamis.errors import DownloadError


class LockedCacheFile(caching.IndexDataCacheFile):  # type: ignore[misc]
    """Index and code of one function's kernels, read and written by one process at a time."""

    def save(self, key: Any, data: Any) -> None:
        """Keep the code of one kernel."""
        with self._locked():
            super().save(key, data)

    def load(self, key: Any) -> Any:
        """The code of one kernel; None: it is not there."""
        with self._locked():
            return super().load(key)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            # A place that cannot be written to does not change either.
            with contextlib.suppress(OSError):
                lock = stack.enter_context(Path(self._cache_path, ".lock").open("a"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def keep_compiled_kernels() -> None:
    """Have Numba keep kernels in tamis's cache directory, unless the user chose a place."""
    caching.IndexDataCacheFile = LockedCacheFile
    if numba.config.CACHE_DIR:
        return
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    try:
        numba.config.CACHE_DIR = str(cache_dir() / "kernels" / digest.hexdigest()[:16])
    except DownloadError:
        return  # no home directory: Numba looks for a place itself
