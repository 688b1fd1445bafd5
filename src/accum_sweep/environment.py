"""What a run ran with: versions and the state of the user's git checkout."""

import functools
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("accum-sweep", "torch", "hydra-core", "mlflow", "pandas")


def describe() -> dict[str, str | bool | None]:
    """Return versions by package, `git_commit` and `git_dirty` of the current folder; None outside a checkout."""
    return {**versions(), **_checkout(Path.cwd())}


@functools.lru_cache(maxsize=1)  # a sweep asks git once
def _checkout(folder: Path) -> dict[str, str | bool | None]:
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no") if commit else None
    return {"git_commit": commit, "git_dirty": None if changes is None else changes != ""}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages a result depends on."""
    return {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
