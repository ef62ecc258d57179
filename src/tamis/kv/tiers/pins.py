"""Pins as a file of their own: who keeps which pages, for stores that have nothing but files."""

import hashlib
import json

from tamis.kv.tiers.base import KEY_BYTES, Key

MAX_BYTES = 1 << 28
"""A file of pins is never larger: 4 million pages."""


def pin_name(owner: str) -> str:
    """The name of an owner's file: nothing of what the owner is called reaches a path."""
    return hashlib.sha256(owner.encode("utf-8", "surrogatepass")).hexdigest() + ".json"


def write_pins(owner: str, keys: list[Key]) -> bytes:
    """What is in the file."""
    return json.dumps({"owner": owner, "keys": [key.hex() for key in keys]}).encode()


def read_pins(name: str, raw: bytes) -> tuple[str, list[Key]]:
    """Owner and keys of the file `name`. Raises ValueError, saying why, for what `write_pins` did not write."""
    try:
        found = json.loads(raw)
        owner, keys = found["owner"], [bytes.fromhex(key) for key in found["keys"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"pins {name} cannot be read: {error!r}") from None
    if not isinstance(owner, str) or pin_name(owner) != name:
        raise ValueError(f"pins {name} are those of another owner")
    if any(len(key) != KEY_BYTES for key in keys):
        raise ValueError(f"pins {name} name pages by keys of another length")
    return owner, keys
