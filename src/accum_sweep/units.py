"""Sizes of memory in words: "8GiB" to bytes and back."""

import math
import re

UNITS = {
    "B": 1,
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)},
}
EXAMPLE = "8GiB"


def parse_bytes(text: object) -> int:
    """Return the bytes that a size such as 8GiB, 512 MiB or 1.5GB stands for.

    GiB and its like are powers of 1024, GB and its like powers of 1000. Raises ValueError, with what is wrong, for a
    number without unit, an unknown unit, and less than a byte.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", str(text))
    if found is None or isinstance(text, bool):
        raise ValueError(f"is no size; write a number with a unit, such as {EXAMPLE}")
    number, unit = found.groups()
    if not unit:
        raise ValueError(f"has no unit; write {number}GiB, {number}MiB or {number}B")
    known = {name.lower(): size for name, size in UNITS.items()}
    if unit.lower() not in known:
        raise ValueError(f"has an unknown unit {unit}; the units are {', '.join(UNITS)}")
    size = int(float(number) * known[unit.lower()])
    if size < 1:
        raise ValueError("is less than a byte")
    return size


def show_bytes(size: float, up: bool = False) -> str:
    """Return a size with the largest binary unit it fills, to four digits: 8 GiB, 235.2 KiB, 68 B. `up`: never less."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= UNITS[unit]:
            shown = size / UNITS[unit]
            if up:
                step = 10.0 ** (math.floor(math.log10(shown)) - 3)
                shown = math.ceil(shown / step) * step
            return f"{shown:.4g} {unit}"
    return f"{size:.0f} B"
