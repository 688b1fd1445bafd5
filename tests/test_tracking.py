"""What arrives in MLflow, read back with MLflow's own client from the real store."""

import json
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient
from mlflow.entities import Run
from safetensors.torch import load_file

from accum_sweep.config import Tracking, flatten
from accum_sweep.errors import ConfigError, without_secrets
from accum_sweep.record import records, sweeps
from accum_sweep.tracking import open_tracker
from conftest import Cli


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, with a space and a quote in its name, where a sweep with a failing run and a single run were run."""
    folder = tmp_path_factory.mktemp("it's a project")
    for words, code in (
        (["-m", "accum_steps=1,2", "device=cpu,cuda:99", "steps=3"], 1),
        (["problem=digits_mlp", "epochs=1", "save_weights=true"], 0),
    ):
        done = subprocess.run([sys.executable, "-m", "accum_sweep", *words], cwd=folder, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def client(project: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{project}/mlflow.db")


@pytest.fixture(scope="module")
def runs(client: MlflowClient) -> list[Run]:
    experiment = client.get_experiment_by_name("accum-sweep")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"]))


def by_name(runs: list[Run], name: str) -> Run:
    (found,) = [run for run in runs if run.info.run_name == name]
    return found


def artifacts(client: MlflowClient, run: Run) -> dict[str, Path]:
    root = Path(client.download_artifacts(run.info.run_id, ""))
    return {path.name: path for path in root.iterdir()}


def test_the_default_store_is_the_one_plain_mlflow_ui_shows(project: Path) -> None:
    left = {path.name for path in project.iterdir()}
    assert left == {"mlflow.db", "mlruns", "runs"}


def test_a_sweep_is_one_parent_with_its_runs_under_it(project: Path, client: MlflowClient, runs: list[Run]) -> None:
    ((_, sweep),) = sweeps(project / "runs")
    parent = by_name(runs, "accum_steps=1,2 device=cpu,cuda:99")
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert [run.info.run_name for run in children] == sweep.names
    assert parent.info.status == "FAILED", "two of its runs failed"
    assert parent.data.tags["accum_sweep.sweep_id"] == sweep.sweep_id
    assert parent.data.metrics == {"runs": 4, "runs_finished": 2}
    assert parent.data.tags["mlflow.source.name"].endswith("-m accum_steps=1,2 device=cpu,cuda:99 steps=3")
    note = parent.data.tags["mlflow.note.content"]
    assert note.startswith("| accum_steps |"), "what is below the first lines is folded away"
    assert "device=cuda:99 is not there" in note
    assert len(artifacts(client, parent)["summary.csv"].read_text().splitlines()) == 1 + 4
    assert len(runs) == 1 + 4 + 1


def test_a_run_has_every_setting_as_a_parameter(project: Path, runs: list[Run]) -> None:
    for record in records(project / "runs"):
        run = by_name(runs, record.name)
        as_text = {k: v if isinstance(v, str) else json.dumps(v) for k, v in flatten(record.config).items()}
        assert run.data.params == as_text
        assert run.data.params["accum_steps"] == str(record.config["accum_steps"])


def test_a_run_has_its_series_by_step_and_its_last_numbers(
    project: Path, client: MlflowClient, runs: list[Run]
) -> None:
    record = next(r for r in records(project / "runs") if r.name == "accum_steps=2 device=cpu")
    run = by_name(runs, record.name)
    for key in ("train/loss", "train/grad_norm", "train/micro_loss"):
        history = client.get_metric_history(run.info.run_id, key)
        assert [point.value for point in history] == record.series[key]
        assert [point.step for point in history] == list(range(1, len(record.series[key]) + 1))
    assert len(record.series["train/loss"]) == 3
    assert len(record.series["train/micro_loss"]) == 6
    for key in ("first_loss", "last_loss", "peak_allocated_bytes", "samples_per_second", "steps_per_second"):
        assert run.data.metrics[key] == record.metrics[key]


def test_a_run_has_weights_config_and_result_as_artifacts(project: Path, client: MlflowClient, runs: list[Run]) -> None:
    record = next(r for r in records(project / "runs") if r.name == "accum_steps=2 device=cpu")
    files = artifacts(client, by_name(runs, record.name))
    assert json.loads(files["result.json"].read_text()) == record.result
    assert yaml.safe_load(files["config.yaml"].read_text()) == record.config
    weights = json.loads(files["weights.json"].read_text())
    assert weights["initial"]["weight"] == [record.result["initial_weight"]]
    assert weights["final"]["weight"] == [record.result["final_weight"]]
    assert "bias" in weights["final"]


def test_a_large_models_weights_are_safetensors_on_request(
    project: Path, client: MlflowClient, runs: list[Run]
) -> None:
    record = next(r for r in records(project / "runs") if r.sweep_id is None)
    run = by_name(runs, record.name)
    files = artifacts(client, run)
    assert "weights.json" not in files
    for when in ("initial", "final"):
        norm = sum(float(t.double().square().sum()) for t in load_file(files[f"{when}.safetensors"]).values()) ** 0.5
        assert run.data.metrics[f"{when}_weight_norm"] == pytest.approx(norm, rel=1e-12)
    assert 0.5 < run.data.metrics["test/accuracy"] <= 1


def test_tags_say_what_the_run_was_and_what_became_of_it(project: Path, runs: list[Run]) -> None:
    for record in records(project / "runs"):
        run = by_name(runs, record.name)
        tags = run.data.tags
        assert tags["accum_sweep.run_key"] == record.run_key
        assert tags["accum_sweep.status"] == record.status
        assert tags.get("accum_sweep.reason") == record.reason
        assert (record.reason or "") in tags.get("mlflow.note.content", "")
        assert tags["accum_sweep.torch"] == record.environment["torch"]
        assert run.info.status == ("FINISHED" if record.status == "finished" else "FAILED")
        if record.status == "finished":
            assert tags["accum_sweep.device_name"]


def test_git_commit_and_dirty_flag_are_those_of_the_users_folder(cli: Cli, tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        done = subprocess.run(["git", *identity, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "first")
    assert cli("tracking=none").returncode == 0
    (tmp_path / "a").write_text("2")
    assert cli("tracking=none").returncode == 0
    clean, dirty = records(tmp_path / "runs")
    assert clean.environment["git_commit"] == dirty.environment["git_commit"] == git("rev-parse", "HEAD")
    assert (clean.environment["git_dirty"], dirty.environment["git_dirty"]) == (False, True)


def test_the_end_of_a_run_and_of_a_sweep_says_where_to_look(cli: Cli, tmp_path: Path) -> None:
    single = cli()
    assert "mlflow ui   then open http://127.0.0.1:5000/#/experiments/" in single.stderr
    other = cli("-m", "seed=0,1", "tracking.uri=sqlite:///other.db")
    assert "mlflow ui --backend-store-uri sqlite:///other.db" in other.stderr
    assert (tmp_path / "other.db").exists()


def test_the_environments_store_is_used_and_named(cli: Cli, tmp_path: Path) -> None:
    done = cli(MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/env.db")
    assert done.returncode == 0, done.stderr
    assert 'mlflow ui --backend-store-uri "$MLFLOW_TRACKING_URI"' in done.stderr
    assert (tmp_path / "env.db").exists()
    assert not (tmp_path / "mlflow.db").exists()


@pytest.fixture
def closed_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        yield listener.getsockname()[1]  # bound, not listening: connections are refused


def test_a_server_that_is_away_costs_a_warning_and_nothing_else(cli: Cli, tmp_path: Path, closed_port: int) -> None:
    done = cli("-m", "seed=0,1", MLFLOW_TRACKING_URI=f"http://me:secret@127.0.0.1:{closed_port}")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is away") == 1
    assert len(list(records(tmp_path / "runs"))) == 2
    assert "2 runs, 2 finished" in done.stdout
    everything = done.stdout + done.stderr + "".join(p.read_text() for p in tmp_path.rglob("*") if p.is_file())
    assert "secret" not in everything


def test_several_first_runs_at_once_share_one_whole_database(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "accum_sweep", "-q"]
    started = [
        subprocess.Popen([*command, f"seed={seed}"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for seed in range(3)
    ]
    for process in started:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert errors == b""
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("accum-sweep")
    assert experiment is not None
    seeds = {run.data.params["seed"] for run in client.search_runs([experiment.experiment_id])}
    assert seeds == {"0", "1", "2"}
    assert {path.name for path in tmp_path.iterdir()} == {"mlflow.db", "mlruns", "runs"}


def test_a_database_of_another_schema_is_told_before_anything_runs(cli: Cli, tmp_path: Path) -> None:
    assert cli().returncode == 0
    with sqlite3.connect(tmp_path / "mlflow.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'e0b1c2d3f4a5'")
    connection.close()
    before = len(list(records(tmp_path / "runs")))
    done = cli("-m", "seed=0,1")
    assert done.returncode == 2, done.stderr
    assert "tracking.uri" in done.stderr
    assert len(list(records(tmp_path / "runs"))) == before


def test_a_folder_and_an_experiment_with_signs_that_mean_something_in_an_address(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "50%20 of? it#all"
    folder.mkdir()
    done = cli("-m", "seed=0,1", "tracking.experiment=/../etc", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in folder.iterdir()} == {"mlflow.db", "mlruns", "runs"}
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert len(list(folder.glob("mlruns/____etc/*/artifacts/record.json"))) == 2


def test_an_experiment_deleted_in_mlflow_is_told(cli: Cli, tmp_path: Path) -> None:
    assert cli().returncode == 0
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("accum-sweep")
    assert experiment is not None
    client.delete_experiment(experiment.experiment_id)
    done = cli()
    assert done.returncode == 2
    assert "tracking.experiment=accum-sweep: was deleted" in done.stderr


def test_long_values_are_cut_visibly_and_whole_in_the_record(cli: Cli, tmp_path: Path) -> None:
    batch = "{x:[[" + "],[".join(["0.123456789"] * 800) + "]],y:[" + ",".join(["1"] * 800) + "]}"
    done = cli(f"problem.batches=[{batch}]", "accum_steps=1")
    assert done.returncode == 0, done.stderr
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("accum-sweep")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["problem.batches"].endswith("…")
    (record,) = records(tmp_path / "runs")
    assert len(record.config["problem"]["batches"][0]["y"]) == 800


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("postgresql://me:s3cret@host/db", "postgresql://***@host/db"),
        ("postgresql://me:s3cr/x#y?z@host/db", "postgresql://***@host/db"),
        ("http:/me:s3cret@host", "http:/***@host"),
        ("postgresql//me:s3cret@host/db", "postgresql//***@host/db"),
        ("me:s3cret@host/db", "***@host/db"),
        ("http://s3cret@host", "http://***@host"),
        ("postgresql://me@host/db", "postgresql://me@host/db"),
        ("http://me:p@ss:w%2Frd@host:5000/x", "http://***@host:5000/x"),
        ("postgresql://h/db?user=me&password=s3cret&sslmode=a", "postgresql://h/db?user=me&password=***&sslmode=a"),
        ("http://host:5000", "http://host:5000"),
        ("sqlite:///mlflow.db", "sqlite:///mlflow.db"),
    ],
)
def test_passwords_are_not_shown(uri: str, shown: str) -> None:
    assert without_secrets(f"at {uri} (away)") == f"at {shown} (away)"


def test_runs_that_run_out_of_memory_and_those_left_out_for_it_arrive(cli: Cli, tmp_path: Path) -> None:
    done = cli("-m", "problem=char_gpt", "steps=1", "memory_limit=100MiB", "micro_batch_size=256,512", "device=cpu")
    assert done.returncode == 1, done.stderr
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("accum-sweep")
    assert experiment is not None
    runs = list(client.search_runs([experiment.experiment_id]))
    oom, skipped = by_name(runs, "micro_batch_size=256"), by_name(runs, "micro_batch_size=512")
    assert (oom.info.status, oom.data.tags["accum_sweep.status"]) == ("FAILED", "oom")
    assert oom.data.metrics["failed_allocation_bytes"] > 0
    assert "no memory for" in oom.data.tags["accum_sweep.reason"]
    assert (skipped.info.status, skipped.data.tags["accum_sweep.status"]) == ("KILLED", "skipped")
    assert skipped.data.tags["accum_sweep.reason"] == "larger than an out-of-memory setting: micro_batch_size=256"
    assert skipped.data.tags["mlflow.parentRunId"] == oom.data.tags["mlflow.parentRunId"]
    assert set(artifacts(client, skipped)) == {"record.json", "config.yaml", "result.json"}


def test_the_tracking_group_knows_none(cli: Cli, tmp_path: Path) -> None:
    done = cli("tracking=none")
    assert done.returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


def test_a_store_that_mlflow_no_longer_takes_is_refused() -> None:
    with pytest.raises(ConfigError, match="database or a tracking server"):
        open_tracker(Tracking(backend="mlflow", uri="mlruns", experiment="x"))
