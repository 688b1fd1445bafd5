"""Records seen as they are written, while a launcher of Hydra's is at work and tells nothing until its end."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from accum_sweep.errors import UserError
from accum_sweep.record import Record, read

EVERY_SECONDS = 0.5


@contextmanager
def watching(folders: Mapping[int, Path], told: Callable[[int, Record], None]) -> Iterator[None]:
    """Call `told(place, record)`, from a thread of its own, once for each record that appears in its folder."""
    pending, over = dict(folders), threading.Event()

    def look() -> None:
        for place, folder in list(pending.items()):
            try:
                record = read(folder)
            except UserError:  # damaged; whoever reads it in the end will say so
                continue
            if record is not None:
                del pending[place]
                told(place, record)

    def watch() -> None:
        while not over.wait(EVERY_SECONDS):
            look()

    thread = threading.Thread(target=watch, name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        look()
