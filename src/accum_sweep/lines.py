"""Between two sizes of micro-batch: the same blocks come and go, and each is a straight line in the size.

So it is for models in which samples do not meet. Whether it is so is for a third size to tell.
"""

from collections.abc import Callable, Iterable

from accum_sweep.ledger import Event, Trace


def traces(sizes: Iterable[int], at: Callable[[int], Trace]) -> dict[int, Trace]:
    """Return the trace of each size. `at` is asked for three, and where these do not lie on lines, for all."""
    wanted = sorted(set(sizes))
    if len(wanted) < 4:
        return {size: at(size) for size in wanted}
    low, high, middle = wanted[0], wanted[-1], wanted[len(wanted) // 2]
    known = {size: at(size) for size in (low, high, middle)}

    def between(size: int) -> Trace | None:
        return _between(known[low], known[high], (size - low, high - low))

    on_lines = between(middle) == known[middle]
    return {size: known.get(size) or (between(size) if on_lines else None) or at(size) for size in wanted}


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
