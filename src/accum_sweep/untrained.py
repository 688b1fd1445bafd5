"""The record of a run that cannot leave one itself: it was skipped, or the process it had is gone."""

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from accum_sweep import environment
from accum_sweep.config import Config, run_key
from accum_sweep.errors import UserError
from accum_sweep.record import Identity, Record, Status, plain, refuse_second, write, write_companions


def leave(
    config: Config,
    folder: Path,
    identity: Identity,
    status: Status,
    reason: str,
    started: datetime | None = None,
    last_words: str | None = None,
) -> Record:
    """Write the record of a run of which nothing else is known into `folder`, and return it.

    `last_words` are those of its process, if it had one. Raises UserError where the folder holds a run already.
    """
    from accum_sweep.device import hardware_name, resolve  # torch; a sweep that begins to skip has loaded it

    refuse_second(folder)
    ended = datetime.now(UTC)
    device = None
    with suppress(UserError):  # it is not there
        device = resolve(config.device, config.precision)
    record = Record(
        run_id=identity.run_id,
        run_key=run_key(config, config.device if device is None else str(device)),
        name=identity.name,
        status=status,
        reason=plain(reason),
        started_at=(started or ended).isoformat(),
        ended_at=ended.isoformat(),
        overrides=identity.overrides,
        config=config.model_dump(mode="json"),
        environment=environment.describe()
        | {"device": device and str(device), "device_name": device and hardware_name(device)},
        traceback=plain(last_words),
        result={"status": status, "reason": plain(reason)},
        sweep_id=identity.sweep_id,
        job_num=identity.job_num,
    )
    folder.mkdir(parents=True, exist_ok=True)
    write(record, folder)
    write_companions(record, folder)
    return record
