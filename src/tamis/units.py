"""Sizes in bytes, as people write them and as they like to read them; values, as messages show them."""

import re

from tamis.errors import ConfigError

_FACTORS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4,
            "ki": 1024, "mi": 1024**2, "gi": 1024**3, "ti": 1024**4}  # fmt: skip
MAX_SIZE = 2**63 - 1
"""Bytes that can be counted in 64 bits."""
_MAX_DIGITS = 20
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)


def parse_size(text: int | str) -> int:
    """Bytes of a size written 8GiB (binary), 500MB (decimal), 1.5G or as a plain number; an int is taken as it is.

    Raises ConfigError naming what is not a size, or is 2**63 bytes or more.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text > MAX_SIZE:
            raise ConfigError(f"size {show(text)} is more than {MAX_SIZE} bytes")
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(f"size {show(text)} is not a number of bytes such as 8GiB or 500MB")
    number, unit = match.groups()
    whole, _, fraction = number.partition(".")
    factor = _FACTORS[(unit or "").lower()]
    if len(whole) > _MAX_DIGITS or len(fraction) > _MAX_DIGITS:
        raise ConfigError(f"size {show(text)} has more than {_MAX_DIGITS} digits")
    size = int(whole) * factor + (int(fraction) * factor // 10 ** len(fraction) if fraction else 0)
    if size > MAX_SIZE:
        raise ConfigError(f"size {show(text)} is more than {MAX_SIZE} bytes")
    return size


def show(value: object) -> str:
    """`value` as a message names it: its repr, cut to 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write an int of more than 4,300 digits
        return "<an integer of thousands of digits>"
    return text if len(text) <= 80 else text[:77] + "..."


def format_size(size: int) -> str:
    """`size` bytes in the largest binary unit that leaves at least 1: "137472" -> "134.2 KiB", "512" -> "512 B"."""
    if size < 1024:
        return f"{size} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        # 1023.95 would print as 1024.0.
        if value < 1023.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"
