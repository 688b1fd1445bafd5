"""The walls of the house: who may import whom, and what the command line must not load to answer."""

import ast
import sys
from pathlib import Path

import pytest

from conftest import Cli

PACKAGE = Path(__file__).parents[1] / "src/accum_sweep"


def imports(path: Path) -> set[str]:
    """Every module a file imports, late imports and those for types included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def importers(package: str) -> set[str]:
    """Names of our files that import `package`."""
    files = PACKAGE.rglob("*.py")
    return {
        str(path.relative_to(PACKAGE))
        for path in files
        if any(name == package or name.startswith(f"{package}.") for name in imports(path))
    }


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("mlflow", {"tracking.py"}),
        (
            "hydra",
            {
                *("app.py", "compose.py", "conduct.py", "hydra_job.py", "jobs.py", "launching.py", "processes.py"),
                *("ray_cluster.py", "search.py", "slurm.py", "sweep.py"),
            },
        ),
        (
            "omegaconf",
            {
                *("app.py", "compose.py", "hydra_job.py", "jobs.py", "processes.py", "ray_cluster.py", "search.py"),
                *("slurm.py", "sweep.py"),
            },
        ),
        ("ray", {"ray_cluster.py"}),
        ("submitit", {"slurm.py"}),
        ("optuna", {"pruning.py", "search.py"}),
        ("pandas", {"advice.py", "exports.py", "summary.py", "table.py", "tidy.py"}),
    ],
)
def test_a_library_is_known_to_its_own_rooms_only(package: str, allowed: set[str]) -> None:
    assert importers(package) == allowed


# The engine is torch alone: it must work in a training script that has nothing of ours but these files.
ENGINE = {
    "accum_sweep.accumulate",
    "accum_sweep.boundary",
    "accum_sweep.equivalence",
    "accum_sweep.full_batch",
    "accum_sweep.fused_linear",
    "accum_sweep.gradients",
    "accum_sweep.losses",
    "accum_sweep.memory",
    "accum_sweep.ranks",
    "accum_sweep.referee",
    "accum_sweep.step_in_backward",
}
OURS = {f"accum_sweep.{path.stem}" for path in PACKAGE.glob("*.py")}
ENGINE_FORBIDS = {"hydra", "mlflow", "pandas", "pydantic", "omegaconf", "accum_sweep.problems", *(OURS - ENGINE)}


@pytest.mark.parametrize(
    ("file", "forbidden"),
    [
        ("ranks.py", {"accum_sweep", "hydra", "mlflow", "pandas", "pydantic"}),
        ("accumulate.py", ENGINE_FORBIDS),
        ("boundary.py", ENGINE_FORBIDS),
        ("losses.py", ENGINE_FORBIDS),
        ("gradients.py", ENGINE_FORBIDS),
        ("full_batch.py", ENGINE_FORBIDS),
        ("equivalence.py", ENGINE_FORBIDS),
        ("fused_linear.py", {"accum_sweep", "hydra", "mlflow", "pandas", "pydantic"}),
        ("step_in_backward.py", ENGINE_FORBIDS),
        ("process_group.py", {"accum_sweep", "hydra", "mlflow", "pandas", "pydantic"}),
        ("referee.py", ENGINE_FORBIDS),
        ("windows.py", {"accum_sweep", "hydra", "mlflow", "pandas", "pydantic"}),
        ("allocator.py", {"accum_sweep", "torch", "hydra", "mlflow", "pandas", "pydantic"}),
        ("ledger.py", {"accum_sweep", "hydra", "mlflow", "pandas", "pydantic"}),
        ("kernels.py", {"hydra", "mlflow", "pandas", "pydantic", *(OURS - {"accum_sweep.memory"})}),
        ("lines.py", {"torch", "hydra", "mlflow", "pandas", "pydantic", *(OURS - {"accum_sweep.ledger"})}),
        ("predict.py", {"hydra", "mlflow", "pandas", "accum_sweep.training", "accum_sweep.execute"}),
        ("plan.py", {"hydra", "mlflow", "pandas", "accum_sweep.training", "accum_sweep.execute"}),
        ("plan_report.py", {"torch", "hydra", "mlflow", "pandas", "accum_sweep.predict"}),
        ("units.py", {"accum_sweep", "torch", "hydra", "mlflow", "pandas", "pydantic"}),
        ("memory.py", {"accum_sweep", "hydra", "mlflow", "pandas", "pydantic"}),
        ("choose.py", {"torch", "hydra", "mlflow", "pandas", "pydantic", *(OURS - {"accum_sweep.units"})}),
        ("auto.py", {"hydra", "mlflow", "pandas", "accum_sweep.execute", "accum_sweep.training"}),
        ("repeat.py", {"hydra", "mlflow", "pandas", "pydantic", "accum_sweep.config", "accum_sweep.training"}),
        ("limit.py", {"torch", "hydra", "mlflow", "pandas", "pydantic", "accum_sweep.config"}),
        ("oom.py", {"hydra", "mlflow", "pandas", "pydantic", "accum_sweep.config", "accum_sweep.execute"}),
        ("prune.py", {"torch", "hydra", "mlflow", "pandas", "accum_sweep.record", "accum_sweep.execute"}),
        ("untrained.py", {"torch", "hydra", "mlflow", "pandas", "accum_sweep.execute", "accum_sweep.training"}),
        ("own_process.py", {"hydra", "mlflow", "pandas", "accum_sweep.exports", "accum_sweep.summary"}),
        ("summary.py", {"torch", "mlflow", "hydra", "accum_sweep.execute", "accum_sweep.tracking"}),
        ("tidy.py", {"torch", "mlflow", "hydra", "accum_sweep.execute", "accum_sweep.tracking"}),
        ("table.py", {"torch", "mlflow", "hydra", "accum_sweep.execute", "accum_sweep.tracking"}),
        ("exports.py", {"torch", "mlflow", "hydra", "accum_sweep.execute", "accum_sweep.tracking"}),
        ("execute.py", {"mlflow", "hydra", "pandas", "accum_sweep.exports", "accum_sweep.summary"}),
        ("record.py", {"torch", "mlflow", "hydra", "pandas", "accum_sweep.config"}),
    ],
)
def test_the_data_goes_one_way(file: str, forbidden: set[str]) -> None:
    found = imports(PACKAGE / file)
    assert not {name for name in found if any(name == f or name.startswith(f"{f}.") for f in forbidden)}


def test_there_is_no_room_for_oddments() -> None:
    assert not [path for path in PACKAGE.rglob("*.py") if path.stem in ("utils", "helpers", "misc", "common")]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["--cfg", "job"], 0),
        (["--version"], 0),
        (["--info", "defaults"], 0),
        (["accum_steps=0"], 2),
        (["acum_steps=1"], 2),
        (["summary", "--list"], 0),
        (["summary", "nothing"], 2),
    ],
)
def test_quick_answers_load_neither_torch_nor_mlflow_nor_pandas(
    cli: Cli, tmp_path: Path, words: list[str], code: int
) -> None:
    (tmp_path / "spy").mkdir()
    spy = "import atexit, sys\natexit.register(lambda: open('loaded', 'w').write(' '.join(sys.modules)))\n"
    (tmp_path / "spy/sitecustomize.py").write_text(spy)
    done = cli(*words, PYTHONPATH=str(tmp_path / "spy"))
    assert done.returncode == code, done.stderr
    loaded = set((tmp_path / "loaded").read_text().split())
    assert "accum_sweep" in loaded, "the spy sees"
    assert not loaded & {"torch", "mlflow", "pandas"}


def test_the_spy_would_see_torch(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "spy").mkdir()
    spy = "import atexit, sys\natexit.register(lambda: open('loaded', 'w').write(' '.join(sys.modules)))\n"
    (tmp_path / "spy/sitecustomize.py").write_text(spy)
    assert cli("tracking=none", PYTHONPATH=str(tmp_path / "spy")).returncode == 0
    loaded = set((tmp_path / "loaded").read_text().split())
    assert "torch" in loaded
    assert not loaded & {"mlflow", "pandas"}, "a run loads what it needs"


def test_the_package_itself_is_light() -> None:
    import accum_sweep

    assert set(accum_sweep.__all__) == {"ConfigError", "Record", "UserError", "run"}
    assert all(callable(getattr(accum_sweep, name)) for name in accum_sweep.__all__)
    with pytest.raises(AttributeError):
        accum_sweep.nothing  # noqa: B018
    assert "accum_sweep" in sys.modules
