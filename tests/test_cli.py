"""Help, information, completion, and the wheel somewhere else."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from accum_sweep.errors import interrupted
from conftest import Cli

ROOT = Path(__file__).parents[1]
SCRIPT = Path(sysconfig.get_path("scripts")) / "accum-sweep"


def test_help_explains_itself_with_examples(cli: Cli) -> None:
    done = cli("--help")
    assert done.returncode == 0, done.stderr
    for words in (
        "-m accum_steps=1,2,4,8",
        "summary latest --csv",
        "problem: causal_lm, char_gpt, custom, digits_cnn, digits_mlp, linear",
        "accum_steps:",
    ):
        assert words in done.stdout
    assert "usage: python -m accum_sweep summary" in cli("summary", "--help").stdout


def test_cfg_and_info_show_the_configuration(cli: Cli) -> None:
    shown = cli("--cfg", "job", "problem=digits_mlp", "optimizer=adamw").stdout
    assert "hidden: 128" in shown
    assert "name: AdamW" in shown
    assert "lr: 0.001" in shown
    assert "problem/linear" in cli("--info", "defaults").stdout


def test_version_names_what_a_result_depends_on(cli: Cli) -> None:
    assert cli("--version").stdout.startswith("python 3.")


def test_the_console_script_does_the_same(tmp_path: Path) -> None:
    done = subprocess.run([SCRIPT, "tracking=none", "-q"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"weight_changed": true' in done.stdout


def test_tab_completion_knows_groups_and_keys(tmp_path: Path) -> None:
    def complete(line: str) -> list[str]:
        environment = {**os.environ, "COMP_LINE": line, "COMP_POINT": str(len(line))}
        command = [SCRIPT, "-sc", "query=bash"]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=True
        ).stdout.split()

    shipped = ["causal_lm", "char_gpt", "custom", "digits_cnn", "digits_mlp", "linear"]
    assert complete("accum-sweep problem=") == [f"problem={name}" for name in shipped]
    assert complete("accum-sweep accum_st") == ["accum_steps="]
    installed = subprocess.run([SCRIPT, "-sc", "install=bash"], capture_output=True, text=True, check=True).stdout
    assert "complete" in installed


@pytest.mark.parametrize("words", ["summary all --csv -", "--help", "--cfg job", "-m seed=0,1 sweep.dry_run=true"])
def test_a_reader_that_stops_early_is_no_error(cli: Cli, tmp_path: Path, words: str) -> None:
    if "summary" in words:
        assert cli("-m", "accum_steps=1,2", "tracking=none").returncode == 0
    command = f"{sys.executable} -m accum_sweep {words} | true"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == ""


def test_a_users_problem_is_added_from_outside(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/halves.py").write_text(
        "import torch\n"
        "from accum_sweep.problems import Problem, ProblemParams\n"
        "class Params(ProblemParams):\n"
        "    @property\n"
        "    def train_samples(self):\n"
        "        return 4\n"
        "    def build(self, dtype):\n"
        "        x = torch.ones(4, 1, dtype=dtype)\n"
        "        loss = lambda model, batch: ((model(batch[0]) - 0.5).square().sum(), len(batch[0]))\n"
        "        return Problem(torch.nn.Linear(1, 1).to(dtype), (x,), loss)\n"
    )
    (tmp_path / "conf/problem").mkdir(parents=True)
    text = "name: lib.halves\ndefault_micro_batch_size: 2\n"
    (tmp_path / "conf/problem/halves.yaml").write_text(text)
    words = ["--config-dir", "conf", "-m", "problem=halves", "accum_steps=1,2", "tracking=none"]
    done = cli(*words)
    assert done.returncode == 0, done.stderr
    assert "problem.name=lib.halves" in done.stdout
    own = tmp_path / "lib/halves.py"
    own.write_text(own.read_text().replace("def train_samples", "def samples"))
    lacking = cli(*words)
    assert lacking.returncode == 2
    assert "lib.halves.Params lacks train_samples" in lacking.stderr


@pytest.mark.slow
def test_the_wheel_works_elsewhere(tmp_path: Path) -> None:
    """Its configs travel, its plugin is found, and nothing of the checkout is used."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        assert "accum_sweep/conf/config.yaml" in archive.namelist()
        assert "hydra_plugins/accum_sweep/__init__.py" in archive.namelist()
    folder = tmp_path / "else where"
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=True
        )

    assert str(site) in run("-c", "import accum_sweep; print(accum_sweep.__file__)").stdout
    assert f"file://{site}" in run("-m", "accum_sweep", "--info", "searchpath").stdout
    done = run("-m", "accum_sweep", "-m", "accum_steps=1,2", "tracking=none")
    assert "2 runs, 2 finished" in done.stdout


UNTIL_THE_END = """
import atexit, sys
from accum_sweep import launch

atexit.register(sys.stderr.write, "taken down")
print("the result")
launch.end(3)
"""


def test_one_of_several_processes_ends_before_what_is_left_could_disturb_it() -> None:
    def ended(world: str) -> tuple[int, str, str]:
        environment = os.environ | {"WORLD_SIZE": world}
        done = subprocess.run([sys.executable, "-c", UNTIL_THE_END], capture_output=True, text=True, env=environment)
        return done.returncode, done.stdout, done.stderr

    assert ended("2") == (3, "the result\n", "")
    assert ended("1") == (3, "the result\n", "taken down"), "the control"


def test_a_ctrl_c_is_recognized_through_what_wraps_it() -> None:
    def wrapped(inner: BaseException) -> ValueError:
        try:
            try:
                raise inner
            except BaseException as error:
                raise RuntimeError("composing") from error
        except RuntimeError:
            try:
                raise ValueError("launching")
            except ValueError as outer:
                return outer

    assert interrupted(wrapped(KeyboardInterrupt()))
    assert not interrupted(wrapped(OSError()))
