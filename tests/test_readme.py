"""What the README shows is run as it stands: its script, and the optimizer and the problem it adds."""

import re
import subprocess
import sys
from pathlib import Path

from conftest import Cli

README = (Path(__file__).parents[1] / "README.md").read_text()
SCRIPT, PROBLEM = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
OPTIMIZER_YAML, PROBLEM_YAML = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)


def test_nothing_is_left_to_be_filled_in() -> None:
    assert not re.findall(r"@[A-Z]+@|TODO|FIXME", README)


def test_the_script_leaves_the_gradient_of_the_full_batch(tmp_path: Path) -> None:
    check = (
        "x, y = (torch.cat(columns) for columns in zip(*window))\n"
        "expected = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))\n"
        "for parameter, gradient in zip(model.parameters(), expected):\n"
        "    torch.testing.assert_close(parameter.grad, gradient)\n"
    )
    assert SCRIPT.count("optimizer.step()") == 1
    (tmp_path / "script.py").write_text(SCRIPT.replace("optimizer.step()", f"{check}optimizer.step()"))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_optimizer_and_the_problem_it_adds_work(cli: Cli, tmp_path: Path) -> None:
    for group in ("optimizer", "problem"):
        (tmp_path / "mine" / group).mkdir(parents=True)
    (tmp_path / "mine/optimizer/rmsprop.yaml").write_text(OPTIMIZER_YAML)
    (tmp_path / "mine/problem/wave.yaml").write_text(PROBLEM_YAML.replace("name: wave", "name: mine.wave"))
    (tmp_path / "mine/wave.py").write_text(PROBLEM)
    words = ["--config-dir", "mine", "-m", "problem=wave", "optimizer=rmsprop", "effective_batch_size=40"]
    done = cli(*words, "accum_steps=1,4", "precision=fp64", "tracking=none")
    assert done.returncode == 0, done.stderr
    assert "2 runs, 2 finished; fixed effective batch" in done.stdout
    assert "optimizer.name=RMSprop" in done.stdout
