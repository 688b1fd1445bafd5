"""Between two sizes of micro-batch: the same blocks come and go, and each is a straight line in the size.

So it is for models in which samples do not meet. Whether it is so is for a third size to tell.
"""

from collections.abc import Callable, Iterable

from accum_sweep.ledger import Event, Trace


def traces(sizes: Iterable[int], at: Callable[[int], Trace]) -> dict[int, Trace]:
    """Return the trace of each size, asking `at` for three of them where the others lie on lines between these.

    The smallest may lie on none, as one sample often does: what has one row only needs no copy to be contiguous.
    """
    wanted = sorted(set(sizes))
    known: dict[int, Trace] = {}

    def trace(size: int) -> Trace:
        if size not in known:
            known[size] = at(size)
        return known[size]

    for number, low in enumerate(wanted[:-3]):
        high, middle = wanted[-1], wanted[(number + len(wanted)) // 2]

        def between(size: int, low: int = low, high: int = high) -> Trace | None:
            return _between(trace(low), trace(high), (size - low, high - low))

        if between(middle) == trace(middle):
            return {size: known.get(size) or between(size) or trace(size) for size in wanted}
    return {size: trace(size) for size in wanted}


def _between(low: Trace, high: Trace, share: tuple[int, int]) -> Trace | None:
    """Return the trace whose blocks have this share (a fraction) of the way from low's to high's; None for no such."""
    if (low.kinds, low.phases, len(low.events)) != (high.kinds, high.phases, len(high.events)):
        return None
    part, whole = share
    events: list[Event] = []
    for (block, size), (other, larger) in zip(low.events, high.events, strict=True):
        more, rest = divmod((larger - size) * part, whole)
        if block != other or rest or bool(size) != bool(larger):
            return None
        events.append((block, size + more))
    return Trace(events, low.kinds, low.phases)
