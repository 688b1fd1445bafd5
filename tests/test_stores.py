"""Real stores: SQLite, PostgreSQL, and an MLflow server that also keeps the files. Each is given every run, once."""

import os
import pwd
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.server import Server, free_port
from mlflow import MlflowClient

from accum_sweep.record import records
from conftest import Cli

pytestmark = pytest.mark.slow

PASSWORD = f"hush-{secrets.token_hex(8)}"
SWEPT = ("-m", "lr=0.1,1e30", "seed=0,1,2", "steps=5")
SIDE_BY_SIDE = ("hydra/launcher=processes", "hydra.launcher.workers=3")


def initdb() -> Path | None:
    """PostgreSQL's own programs are not on the path in Debian."""
    found = [
        *map(Path, filter(None, [shutil.which("initdb")])),
        *sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")),
    ]
    return next((path for path in reversed(found) if path.with_name("postgres").exists()), None)


@pytest.fixture(scope="module")
def postgresql() -> Iterator[str]:
    """The address of a PostgreSQL server with one user, who needs a password."""
    program = initdb()
    if program is None:
        pytest.skip("PostgreSQL is not installed")
    pytest.importorskip("psycopg", reason="psycopg (extra [postgresql]) is not installed")
    folder = Path(tempfile.mkdtemp(prefix="accum-sweep-postgresql-"))
    as_user: list[str] = []
    if os.geteuid() == 0:  # PostgreSQL does not run as root
        shutil.chown(folder, "nobody")
        as_user = ["setpriv", f"--reuid={pwd.getpwnam('nobody').pw_uid}", "--clear-groups", "--"]
    data, port = folder / "data", free_port()
    (folder / "password").write_text(PASSWORD)
    (folder / "password").chmod(0o644)
    words = ["-D", str(data), "-U", "me", "--auth=scram-sha-256", f"--pwfile={folder / 'password'}", "-N"]
    subprocess.run([*as_user, program, *words], check=True, capture_output=True, cwd=folder)
    server = subprocess.Popen(
        [*as_user, program.with_name("postgres"), "-D", str(data), "-p", str(port), "-k", str(folder), "-F"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        ready = [program.with_name("pg_isready"), "-h", "127.0.0.1", "-p", str(port)]
        deadline = time.monotonic() + 60
        while subprocess.run(ready, capture_output=True).returncode != 0:
            assert server.poll() is None, "PostgreSQL has ended"
            assert time.monotonic() < deadline, "PostgreSQL does not answer"
            time.sleep(0.1)
        yield f"postgresql://me:{PASSWORD}@127.0.0.1:{port}"
    finally:
        server.send_signal(signal.SIGINT)  # ends its clients' connections
        server.wait(timeout=60)
        shutil.rmtree(folder)


@pytest.fixture
def database(postgresql: str) -> str:
    """The address of a new, empty database."""
    import psycopg

    name = f"d{secrets.token_hex(4)}"
    with psycopg.connect(f"{postgresql}/postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return f"{postgresql}/{name}"


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server")) as found:
        yield found


def everything(address: str) -> tuple[list[Any], MlflowClient]:
    client = MlflowClient(address)
    experiment = client.get_experiment_by_name("accum-sweep")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id])), client


def check_all_there(address: str, folder: Path) -> None:
    """Every record is there once, ended, under its parent, with its files."""
    runs, client = everything(address)
    on_disk = {record.run_id: record for record in records(folder / "runs")}
    children = [run for run in runs if "accum_sweep.run_id" in run.data.tags]
    (parent,) = [run for run in runs if run not in children]
    assert Counter(run.data.tags["accum_sweep.run_id"] for run in children) == Counter(list(on_disk))
    assert "RUNNING" not in {run.info.status for run in runs}
    for run in children:
        record = on_disk[run.data.tags["accum_sweep.run_id"]]
        assert run.info.status == ("FINISHED" if record.status == "finished" else "FAILED")
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.data.params["seed"] == str(record.config["seed"])
        losses = client.get_metric_history(run.info.run_id, "train/loss")
        assert [m.value for m in losses] == [value for value in record.series["train/loss"] if value is not None]
        assert "record.json" in {file.path for file in client.list_artifacts(run.info.run_id)}
    assert "summary.csv" in {file.path for file in client.list_artifacts(parent.info.run_id)}
    said = [run.data.to_dictionary() for run in runs]
    assert PASSWORD not in repr(said)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def words_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("launcher", [(), SIDE_BY_SIDE])
def test_postgresql_is_given_every_run_and_tells_nobody_the_password(
    cli: Cli, tmp_path: Path, database: str, launcher: Sequence[str]
) -> None:
    done = cli(*SWEPT, *launcher, MLFLOW_TRACKING_URI=database)
    assert done.returncode == 1, done.stderr
    assert "finished" in done.stdout
    assert "MLflow does not take" not in done.stderr
    check_all_there(database, tmp_path)
    assert PASSWORD.encode() not in words_of(tmp_path)
    assert PASSWORD not in done.stdout + done.stderr
    assert 'mlflow ui --backend-store-uri "$MLFLOW_TRACKING_URI"' in done.stderr
    synced = cli("sync", MLFLOW_TRACKING_URI=database)
    assert synced.stdout == "0 runs sent, 0 completed, 0 sweeps closed, 6 were there\n"


@pytest.mark.parametrize("wrong", ["password", "database"])
def test_what_the_database_refuses_is_told_at_once_and_without_the_password(
    cli: Cli, tmp_path: Path, database: str, wrong: str
) -> None:
    address = database.replace(PASSWORD, f"{PASSWORD}-not") if wrong == "password" else f"{database}-not"
    began = time.monotonic()
    done = cli("seed=1", MLFLOW_TRACKING_URI=address)
    assert time.monotonic() - began < 30
    assert done.returncode == 2, done.stderr
    assert "MLFLOW_TRACKING_URI=postgresql://***@127.0.0.1" in done.stderr
    assert ("password authentication failed" if wrong == "password" else "does not exist") in done.stderr
    assert "mend" in done.stderr
    assert "Traceback" not in done.stderr
    assert PASSWORD not in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


def test_a_database_that_is_away_costs_a_warning(cli: Cli, tmp_path: Path, database: str) -> None:
    away = re.sub(r":\d+/", f":{free_port()}/", database)
    done = cli("-m", "seed=1,2", MLFLOW_TRACKING_URI=away)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is away") == 1
    assert PASSWORD not in done.stdout + done.stderr
    assert PASSWORD.encode() not in words_of(tmp_path)
    sent = cli("sync", MLFLOW_TRACKING_URI=database)
    assert sent.stdout == "2 runs sent, 0 completed, 1 sweeps closed, 0 were there\n"
    check_all_there(database, tmp_path)


@pytest.mark.parametrize("launcher", [(), SIDE_BY_SIDE])
def test_a_server_is_given_every_run_with_its_files(
    cli: Cli, tmp_path: Path, server: Server, launcher: Sequence[str]
) -> None:
    done = cli(*SWEPT, *launcher, f"tracking.uri={server.address}")
    assert done.returncode == 1, done.stderr
    check_all_there(server.address, tmp_path)
    assert not (tmp_path / "mlflow.db").exists()
    assert f"in MLflow: {server.address}/#/experiments/" in done.stderr


def test_a_server_that_goes_away_and_comes_back_misses_nothing(cli: Cli, tmp_path: Path, server: Server) -> None:
    words = ("-m", "seed=range(0,8)", "problem=digits_mlp", "epochs=1", f"tracking.uri={server.address}")
    command = [sys.executable, "-m", "accum_sweep", *words]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(list((tmp_path / "runs").rglob("record.json"))) >= 2)
    server.end()
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert len(list(records(tmp_path / "runs"))) == 8
    assert err.count("is away") == 1, err
    assert "python -m accum_sweep sync" in err
    assert "does not take" not in err
    assert "Retrying" not in err
    assert cli("sync").returncode == 2
    server.start()
    assert cli("sync").returncode == 0
    again = cli("sync")
    assert again.stdout == "0 runs sent, 0 completed, 0 sweeps closed, 8 were there\n"
    check_all_there(server.address, tmp_path)


def test_a_server_that_is_restarted_in_between_is_given_what_follows(cli: Cli, tmp_path: Path, server: Server) -> None:
    words = ("-m", "seed=range(0,20)", "problem=digits_mlp", "epochs=2", f"tracking.uri={server.address}")
    said = tmp_path / "said"
    with said.open("w") as file:
        command = [sys.executable, "-m", "accum_sweep", *words]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=file)
        wait_for(lambda: len(list((tmp_path / "runs").rglob("record.json"))) >= 2)
        server.end()
        wait_for(lambda: "is away" in said.read_text())
        process.send_signal(signal.SIGSTOP)  # however long the server takes to start: there is work left
        server.start()
        process.send_signal(signal.SIGCONT)
        assert process.wait(timeout=240) == 0, said.read_text()
    assert "MLflow answers again" in said.read_text()
    sent = {run.data.tags.get("accum_sweep.run_id") for run in everything(server.address)[0]}
    last = max(records(tmp_path / "runs"), key=lambda record: record.job_num or 0)
    assert last.run_id in sent
    done = cli("sync")
    assert done.returncode == 0
    assert not done.stdout.startswith("0 runs sent, 0 completed"), "what came while it was away was missing"
    check_all_there(server.address, tmp_path)


def test_many_processes_write_into_one_file(cli: Cli, tmp_path: Path) -> None:
    address = f"sqlite:///{tmp_path}/mlflow.db"
    words = ("-m", "seed=range(0,40)", "hydra/launcher=processes", "hydra.launcher.workers=4")
    done = cli(*words)
    assert done.returncode == 0, done.stderr
    assert "locked" not in done.stderr
    check_all_there(address, tmp_path)
