"""How far a sweep is: one line that renews itself on a terminal, plain log lines elsewhere."""

import logging
import shutil
import sys
import time

from accum_sweep.record import Record

log = logging.getLogger(__name__)


class Progress:
    """Counts the runs of a sweep and says so on standard error. Silent where INFO messages are off.

    `failed` is how many were neither finished nor skipped.

    `seen` says that runs are counted as they end: only then is there a time left to tell.
    """

    def __init__(self, total: int, seen: bool) -> None:
        self._total = total
        self._seen = seen
        self._done = 0
        self.failed = 0
        self._skipped = 0
        self._start = time.monotonic()
        self._live = sys.stderr.isatty() and log.isEnabledFor(logging.INFO)

    def starting(self, name: str) -> None:
        """Show the run that begins; on a terminal only."""
        if self._live:
            self._renew(f"{self._state()}  {name}")

    def ended(self, name: str, record: Record | None) -> None:
        """Count a run and say what became of it; None: it left no record."""
        self._done += 1
        skipped = record is not None and record.status == "skipped"
        self._skipped += skipped
        self.failed += not skipped and (record is None or record.status not in ("finished", "pruned"))
        if self._live:
            self._renew(f"{self._state()}  {name}")
        elif record is None:
            log.info("%s  %s: left no record", self._state(), name)
        elif record.status == "finished":
            loss = record.metrics.get("last_loss")
            log.info("%s  %s: finished, last loss %s", self._state(), name, loss and f"{loss:.4g}")
        else:
            log.info("%s  %s: %s, %s", self._state(), name, record.status, record.reason)

    def close(self) -> None:
        """Clear the line."""
        if self._live:
            self._renew("")

    def _state(self) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        skipped = f", {self._skipped} skipped" if self._skipped else ""
        left = ""
        if self._seen and 0 < self._done < self._total:
            seconds = (time.monotonic() - self._start) / self._done * (self._total - self._done)
            left = f", {_duration(seconds)} left"
        return f"{self._done}/{self._total}{failed}{skipped}{left}"

    def _renew(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"\r\x1b[K{text[:width]}")
        sys.stderr.flush()


def _duration(seconds: float) -> str:
    """Put a time into words of a precision one cares about."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
