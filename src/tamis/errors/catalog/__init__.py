"""The catalogue of errors: every message with its cause, its fix and code that proves both.

`load_catalog()` reads tamis's own, `load_catalog(path)` a data set that `tamis errors build` wrote; `id_of(error)` is
the id under which `tamis explain` shows an error. The parts: `template` (messages), `record`, `written` (the records in
`errors/records/*.toml`), `scan` with `module`, `expressions` and `messages` (what the code raises), `build` (both
joined), `dataset` (files and their check).
"""

from tamis.errors.catalog.catalog import Catalog, id_of, load_catalog
from tamis.errors.catalog.record import ErrorRecord

__all__ = ["Catalog", "ErrorRecord", "id_of", "load_catalog"]
