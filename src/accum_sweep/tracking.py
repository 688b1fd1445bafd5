"""MLflow: where finished records go to be browsed. The only file that imports mlflow, and it does so late.

The record on disk is the truth; this is a copy of it. A server that is away therefore costs a warning and nothing else,
while a local database that cannot be written is the user's to mend, and told before the first run.
"""

import contextlib
import functools
import json
import logging
import math
import os
import re
import shlex
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from accum_sweep import environment, store
from accum_sweep.config import Tracking, flatten
from accum_sweep.errors import ConfigError, Fault, without_secrets
from accum_sweep.record import Record, Status, SweepRecord

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

log = logging.getLogger(__name__)

# All others: FAILED. MLflow has no word for what was never begun, or is ended early.
ENDED: dict[Status, str] = {"finished": "FINISHED", "interrupted": "KILLED", "skipped": "KILLED", "pruned": "KILLED"}
RUNS_AT_ONCE = 1000
METRICS_AT_ONCE = 1000  # that is what MLflow takes
PARAMS_AT_ONCE = 100
LONGEST_VALUE = 6000  # characters of a parameter or tag; MLflow cuts the rest off without a word
LONGEST_TAG = 8000  # of a run's description


class _AwayError(Exception):
    """The store has been away, and still is."""


class Tracker:
    """An open experiment in one MLflow store."""

    def __init__(
        self, client: "MlflowClient", uri: str, experiment_id: str, server: bool, from_environment: bool
    ) -> None:
        self._client = client
        self._uri = uri
        self._experiment_id = experiment_id
        self._server = server
        self._from_environment = from_environment
        self._away = False  # when it was last spoken to

    @contextlib.contextmanager
    def tolerant(self, what: str) -> Iterator[None]:
        """Turn a failure to write to the store into a warning: the record on disk has everything.

        That the store is away is said once. Until it answers again, it is not spoken to.
        """
        try:
            yield
        except _AwayError:
            log.debug("%s is not told", what)
        except Exception as error:  # MLflow and the drivers below it raise what they like
            log.debug("MLflow's own words", exc_info=True)
            if trouble := store.unreachable(self._uri):
                self._away = True
                _warn_away(self._uri, trouble)
            else:
                log.warning("MLflow does not take %s (%s); its folder has everything", what, _first_line(error))

    def _knock(self) -> None:
        """Raise _AwayError where the store was away and still is: MLflow itself would try for long."""
        if self._away:
            if trouble := store.unreachable(self._uri):
                raise _AwayError(trouble)
            self._away = False
            log.info("MLflow answers again; `python -m accum_sweep sync` sends what it missed")

    def start_sweep(self, sweep: SweepRecord) -> str:
        """Create the parent run of a sweep, or open it again, and return its MLflow run id."""
        self._knock()
        if sweep.parent_run_id is not None:
            self._client.update_run(sweep.parent_run_id, "RUNNING")
            return sweep.parent_run_id
        tags = {
            "accum_sweep.sweep_id": sweep.sweep_id,
            "mlflow.source.name": _cut(shlex.join(["python", "-m", "accum_sweep", "-m", *sweep.overrides])),
            "mlflow.source.type": "LOCAL",
            "mlflow.source.git.commit": environment.describe()["git_commit"],
        }
        return self._create_run(sweep.name, tags, sweep.created_at)

    def end_sweep(self, sweep: SweepRecord, status: Status, note: str, counts: dict[str, int], table: Path) -> None:
        """Close the parent run; `note` is Markdown and becomes its description."""
        from mlflow.entities import Metric

        self._knock()
        run_id, ended_at = sweep.parent_run_id or "", sweep.ended_at or ""
        with self._ending(run_id, status, ended_at):
            link = f"\n\n[Compare the runs in charts]({self._charts(run_id)})"
            self._client.set_tag(run_id, "mlflow.note.content", _cut_lines(note, LONGEST_TAG - len(link)) + link)
            self._client.set_tag(run_id, "accum_sweep.status", status)
            metrics = [Metric(key, count, _milliseconds(ended_at), 0) for key, count in counts.items()]
            self._client.log_batch(run_id, metrics=metrics)
            self._client.log_artifact(run_id, str(table))

    def log_run(self, record: Record, folder: Path, parent_run_id: str | None = None, run_id: str | None = None) -> str:
        """Copy a record, and every file of its folder, into a run of its own; return the MLflow run id.

        `run_id` is that of a run which was begun and not ended: what it has already, it takes once more as the same.
        """
        from mlflow.entities import Param

        self._knock()
        run_id = run_id or self._create_run(record.name, _tags(record, parent_run_id), record.started_at)
        with self._ending(run_id, record.status, record.ended_at):
            params = [Param(key, _cut(_as_text(value))) for key, value in flatten(record.config).items()]
            metrics = list(_metrics(record))
            for start in range(0, len(params), PARAMS_AT_ONCE):
                self._client.log_batch(run_id, params=params[start : start + PARAMS_AT_ONCE])
            for start in range(0, len(metrics), METRICS_AT_ONCE):
                self._client.log_batch(run_id, metrics=metrics[start : start + METRICS_AT_ONCE])
            self._client.log_artifacts(run_id, str(folder))
        return run_id

    def known(self, sweep_id: str | None = None) -> dict[str, tuple[str, bool]]:
        """Return, of one sweep or all, by run id and sweep id of ours the MLflow run id and whether it has ended."""
        which = "" if sweep_id is None else f"tags.`accum_sweep.sweep_id` = '{sweep_id}'"
        found: dict[str, tuple[str, bool]] = {}
        token = None
        while True:
            page = self._client.search_runs([self._experiment_id], which, max_results=RUNS_AT_ONCE, page_token=token)
            for run in page:
                tags = run.data.tags
                own = tags.get("accum_sweep.run_id") or tags.get("accum_sweep.sweep_id")
                if own is not None:
                    found[own] = (run.info.run_id, run.info.status != "RUNNING")
            token = page.token
            if not token:
                return found

    def how_to_look(self, run_id: str) -> str:
        """Return the command and the address that lead to a run's page."""
        page = f"#/experiments/{self._experiment_id}/runs/{run_id}?workflowType=machine_learning"
        if self._server:
            return f"in MLflow: {without_secrets(self._uri).rstrip('/')}/{page}"
        command = "mlflow ui"
        if self._uri != store.DEFAULT_URI:
            # Never the URI from the environment itself: it is where a password is.
            uri = '"$MLFLOW_TRACKING_URI"' if self._from_environment else shlex.quote(self._uri)
            command += f" --backend-store-uri {uri}"
        return f"in MLflow: {command}   then open http://127.0.0.1:5000/{page}"

    def _charts(self, parent_run_id: str) -> str:
        """Return the page, relative to any of MLflow's, with the curves of a sweep's runs laid over each other."""
        query = {
            "workflowType": "machine_learning",
            "searchFilter": f"tags.mlflow.parentRunId = '{parent_run_id}'",
            "compareRunsMode": "CHART",
            "orderByKey": "params.`accum_steps`",  # sorted otherwise, they fold under their parent
            "orderByAsc": "true",
        }
        return f"#/experiments/{self._experiment_id}/runs?{urlencode(query, quote_via=quote)}"

    @contextlib.contextmanager
    def _ending(self, run_id: str, status: Status, ended_at: str) -> Iterator[None]:
        """End the run in MLflow whatever becomes of what is logged to it: none stays RUNNING for ever."""
        try:
            yield
        finally:
            self._client.set_terminated(run_id, ENDED.get(status, "FAILED"), _milliseconds(ended_at))

    def _create_run(self, name: str, tags: dict[str, Any], started_at: str) -> str:
        given = {key: _cut(_as_text(value)) for key, value in tags.items() if value is not None}
        run = self._client.create_run(self._experiment_id, _milliseconds(started_at), given, name)
        return str(run.info.run_id)


@functools.lru_cache(maxsize=8)
def open_tracker(settings: Tracking) -> Tracker | None:
    """Open the store, once a process; None where tracking is off, or its server is away (after a warning).

    Raises ConfigError where a store on this machine cannot be used.
    """
    if settings.backend == "none":
        return None
    from_environment = settings.uri is None and "MLFLOW_TRACKING_URI" in os.environ
    uri = settings.uri or os.environ.get("MLFLOW_TRACKING_URI") or store.DEFAULT_URI
    key = "MLFLOW_TRACKING_URI" if from_environment else "tracking.uri"
    scheme = store.scheme(uri, key)
    if scheme == "sqlite":
        store.prepare_sqlite(uri, key, _create_tables)
    elif trouble := store.unreachable(uri):
        _warn_away(uri, trouble)
        return None
    try:
        if scheme not in ("sqlite", *store.SERVERS):
            store.check_database(uri, key)
        return _open(uri, scheme in store.SERVERS, settings.experiment, from_environment)
    except ConfigError:
        raise
    except ImportError as error:
        raise ConfigError([Fault(key, uri, f"needs a driver ({error})", "install it with pip")]) from error
    except Exception as error:  # MLflow and the drivers below it raise what they like
        if scheme == "sqlite":
            remedy = "mend it, or choose another tracking.uri"
            raise ConfigError([Fault(key, uri, f"MLflow cannot use it ({_first_line(error)})", remedy)]) from error
        _warn_away(uri, _first_line(error))
        return None


def _warn_away(uri: str, trouble: str) -> None:
    missed = "runs are kept in their folders; `python -m accum_sweep sync` sends them when it is back"
    log.warning("MLflow at %s is away (%s): %s", without_secrets(uri), trouble, missed)


def _open(uri: str, server: bool, experiment: str, from_environment: bool) -> Tracker:
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # by default a lost server costs minutes a run
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # each of its retries is a warning
    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        # Not MLflow's default experiment: if `mlflow ui` made that one, its artifacts can only be written through the
        # server. A server gives its own location; beside a database, ours is absolute.
        folder = re.sub(r"[^\w -]", "_", experiment)  # a name may hold slashes and dots; it is no path
        location = (Path.cwd() / "mlruns" / folder).as_uri() if not server else None
        try:
            return Tracker(client, uri, client.create_experiment(experiment, location), server, from_environment)
        except MlflowException:  # another process was faster
            found = client.get_experiment_by_name(experiment)
            if found is None:
                raise
    if found.lifecycle_stage != "active":
        remedy = "restore it in MLflow, or choose another name"
        raise ConfigError([Fault("tracking.experiment", experiment, "was deleted", remedy)])
    return Tracker(client, uri, found.experiment_id, server, from_environment)


def _create_tables(uri: str) -> None:
    for noisy in ("mlflow.store.db.utils", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    opened = SqlAlchemyStore(uri, (Path.cwd() / "mlruns").as_uri())  # type: ignore[no-untyped-call]
    opened.engine.dispose()


def _tags(record: Record, parent_run_id: str | None) -> dict[str, Any]:
    return {
        "mlflow.parentRunId": parent_run_id,
        "mlflow.note.content": record.reason and f"**{record.status}**: {record.reason}",
        "mlflow.source.name": shlex.join(["python", "-m", "accum_sweep", *record.overrides]),
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": record.environment.get("git_commit"),
        "accum_sweep.sweep_id": record.sweep_id,
        "accum_sweep.run_id": record.run_id,
        "accum_sweep.run_key": record.run_key,
        "accum_sweep.status": record.status,
        "accum_sweep.reason": record.reason,
        "accum_sweep.auto": record.auto.get("why"),
        "accum_sweep.equivalence": record.equivalence.get("verdict"),
        "accum_sweep.equivalence_reason": record.equivalence.get("reason") or None,
        **{f"accum_sweep.{key}": value for key, value in record.environment.items()},
        **{key: value for key, value in record.result.items() if key in ("initial_weight", "final_weight")},
    }


def _metrics(record: Record) -> Iterator["Metric"]:
    """Yield final metrics at the last step, and series by step; what is not finite breaks MLflow's pages."""
    from mlflow.entities import Metric

    started, ended = _milliseconds(record.started_at), _milliseconds(record.ended_at)
    for key, number in record.metrics.items():
        if number is not None and math.isfinite(number):
            yield Metric(key, number, ended, int(record.metrics.get("steps_done") or 0))
    for key, numbers in record.series.items():
        for index, value in enumerate(numbers, start=1):
            if value is not None and math.isfinite(value):
                yield Metric(key, value, started + (ended - started) * index // len(numbers), index)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


def _milliseconds(iso: str) -> int:
    return int(datetime.fromisoformat(iso).timestamp() * 1000)


def _cut_lines(text: str, longest: int) -> str:
    """Return as many whole lines of `text` as fit."""
    if len(text) <= longest:
        return text
    note = "\n\n(too long for this page; summary.csv has all of it)"
    return text[: longest - len(note)].rpartition("\n")[0] + note


def _first_line(error: Exception) -> str:
    return without_secrets((str(error).strip() or type(error).__name__).splitlines()[0])
