"""Keys of pages: what a page's bytes depend on, hashed, so that a hit is only ever for the same bytes.

A page's K and V depend on the tokens in it and on every token before it, on the model, and on how the layout stores
them. So keys are chained: a page's key is the hash of the key of the page before it and of its own tokens, and what
stands before the first page is the hash of everything else.
"""

import hashlib
from array import array
from collections.abc import Sequence

from tamis.kv.layout import KVLayout
from tamis.kv.tiers.base import Key

_PURPOSE = b"tamis page 1"
"""Changes whenever the same tokens shall have other keys: with the blob format, or with what kernels compute."""


def root_key(model_fingerprint: str, layout: KVLayout, salt: bytes) -> Key:
    """What stands before the first page: model, layout (stage, head range and scales included) and salt."""
    digest = hashlib.sha256(_PURPOSE)
    for field in (model_fingerprint.encode(), layout.fingerprint().encode(), salt):
        digest.update(len(field).to_bytes(8, "little") + field)
    return digest.digest()


def next_keys(before: Key, token_ids: Sequence[int], page_size: int) -> list[Key]:
    """The keys of the full pages of `token_ids`, which follow the page whose key is `before` (or a `root_key`)."""
    keys: list[Key] = []
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        tokens = array("q", token_ids[start : start + page_size]).tobytes()
        before = hashlib.sha256(before + tokens).digest()
        keys.append(before)
    return keys


def page_keys(
    model_fingerprint: str, layout: KVLayout, salt: bytes, token_ids: Sequence[int], page_size: int
) -> list[Key]:
    """The keys of the full pages of a sequence: key i covers tokens 0 to (i + 1) * page_size."""
    return next_keys(root_key(model_fingerprint, layout, salt), token_ids, page_size)
