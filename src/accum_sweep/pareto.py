"""The Pareto front. Standard library only."""

import math
from collections.abc import Sequence


def on_front(points: Sequence[tuple[float, ...]]) -> list[bool]:
    """Tell of each point, whose coordinates are all to be small, whether none is better: no worse in any, less in one.

    Points with a coordinate that is NaN are never on the front, and beat none.
    """
    known = {point for point in points if not any(map(math.isnan, point))}
    return [point in known and not any(_beats(other, point) for other in known) for point in points]


def _beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
