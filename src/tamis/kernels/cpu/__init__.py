"""Kernels in Numba for CPUs, compiled at first use and kept in the cache directory.

Numba takes a compiled kernel from its cache unless the kernel's own file changed; a change in a file that the kernel's
file imports goes unnoticed. So the cache of each version of these sources has a directory of its own.
"""

import hashlib
from pathlib import Path

import numba

from tamis.cache import cache_dir
from tamis.errors import DownloadError


def _keep_compiled_kernels() -> None:
    if numba.config.CACHE_DIR:  # the user's own choice
        return
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    try:
        numba.config.CACHE_DIR = str(cache_dir() / "kernels" / digest.hexdigest()[:16])
    except DownloadError:
        return  # no home directory: Numba looks for a place itself


_keep_compiled_kernels()
