"""Which store a tracking URI means, and whether it can be used: told at once, and without loading MLflow."""

import contextlib
import os
import socket
import sqlite3
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from accum_sweep.errors import ConfigError, Fault

DEFAULT_URI = "sqlite:///mlflow.db"  # what plain `mlflow ui` shows
SERVERS = ("http", "https")
PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306, "mssql": 1433}
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")


def scheme(uri: str, key: str) -> str:
    """Return what the address begins with, without the name of a driver; raise ConfigError where it is no store."""
    try:
        parts = urlsplit(uri)
        _ = parts.port  # a ValueError where it is no number
        found = parts.scheme.partition("+")[0]
    except ValueError:
        found = ""
    if found not in SERVERS + DATABASES:
        remedy = f"for example {DEFAULT_URI}, postgresql://..., or http://host:5000"
        raise ConfigError([Fault(key, uri, "must be a database or a tracking server", remedy)])
    return found


def unreachable(uri: str) -> str | None:
    """Say why a tracking server, or a database's, does not answer; None if it does, or is a file."""
    parts = urlsplit(uri)
    port = parts.port or PORTS.get(parts.scheme.partition("+")[0])
    if port is None:
        return None
    try:
        with socket.create_connection((parts.hostname or "", port), timeout=5):
            return None
    except (OSError, UnicodeError) as error:  # a name that is none is a UnicodeError
        return str(error)


def check_database(uri: str, key: str) -> None:
    """Raise ConfigError, which names `key`, where a database's server refuses us: MLflow itself retries for minutes."""
    from sqlalchemy import create_engine
    from sqlalchemy.exc import SQLAlchemyError

    engine = create_engine(uri)
    try:
        engine.connect().close()
    except SQLAlchemyError as error:
        why = str(error.__cause__ or error).strip().splitlines()[-1]
        raise ConfigError(
            [Fault(key, uri, f"its server refuses us ({why})", "mend the user, password or name")]
        ) from error
    finally:
        engine.dispose()


def prepare_sqlite(uri: str, key: str, create_tables: Callable[[str], None]) -> None:
    """Make sure that the database file is there and can be written, at once: MLflow itself retries for minutes.

    `create_tables` is called with the URI of a new, empty database. Raises ConfigError, which names `key`.
    """
    from sqlalchemy.engine import make_url

    database = make_url(uri).database
    if not uri.startswith("sqlite:///") or not database or database.startswith((":memory:", "file:")):
        raise ConfigError([Fault(key, uri, "must name a file", f"for example {DEFAULT_URI}")])
    path = Path(database)
    remedy = "choose a file in a folder that you may write to"
    try:
        if not path.exists():
            _create_database(path, create_tables)
        elif not path.is_file():
            raise ConfigError([Fault(key, uri, "is no file", remedy)])
        with contextlib.closing(sqlite3.connect(path, timeout=20)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("CREATE TABLE accum_sweep_probe (x)")
            connection.rollback()
    except sqlite3.DatabaseError as error:
        if "locked" not in str(error):  # locked is busy, and MLflow waits for its turn
            raise ConfigError([Fault(key, uri, f"cannot be written ({error})", remedy)]) from error
    except OSError as error:
        raise ConfigError([Fault(key, uri, f"cannot be written ({error.strerror})", remedy)]) from error


def _create_database(path: Path, create_tables: Callable[[str], None]) -> None:
    """Create the tables in a temporary file and link it into place: of several at once, one wins, whole."""
    if not path.parent.is_dir():
        raise FileNotFoundError(2, f"there is no folder {path.parent}")
    for left in path.parent.glob(f".{path.name}.*"):  # by a process that was killed here
        if time.time() - left.stat().st_mtime > 3600:
            left.unlink(missing_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = path.with_name(Path(name).name)  # as the user wrote it: an absolute path may hold %, ? and #
    try:
        create_tables(f"sqlite:///{temporary}")
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        for left in path.parent.glob(f"{temporary.name}*"):
            left.unlink(missing_ok=True)
