"""What a comparison is, in words: its kind, what is the same for all, why gradients differ, which setting to take."""

from collections.abc import Sequence
from typing import Any

from accum_sweep.advice import NEARLY, advise
from accum_sweep.summary import Comparison
from accum_sweep.tidy import missing
from accum_sweep.units import show_bytes

KINDS = {
    "micro_batch_size": "fixed micro-batch: the effective batch grows with accum_steps",
    "effective_batch_size": "fixed effective batch: the micro-batch shrinks as accum_steps grows",
}
# Settings that go without saying where they are as most people leave them.
UNREMARKABLE: dict[str, Any] = {
    "lr_schedule": "constant",
    "warmup_steps": 0,
    "on_nonfinite": "stop",
    "batchnorm": "train",
    "checkpointing": False,
    "compile": False,
    "fused_linear": False,
    "step_in_backward": False,
    "parallel": "ddp",
    "sync_every_micro_batch": False,
    "processes": 1,
}
BYTES = ("memory_budget", "memory_limit")  # settings that are sizes of memory
MANY = 4  # settings that are named beside a reason
_SLOWER = f"{100 * (1 - NEARLY):.0f} %"
RULE = f"(the least memory of those that are the same training, fit, and are within {_SLOWER} of the fastest)"
LONGEST_CONSTANT = 40  # characters of a setting; longer ones the caption leaves out and the table cuts


def caption(comparison: Comparison) -> list[str]:
    """Say what the table holds: which kind of sweep, what is the same everywhere, how to read it."""
    rows = comparison.rows
    runs, finished = int(rows["runs"].sum()), int(rows["finished"].sum())
    kind = f"; {KINDS[comparison.kind]}" if comparison.kind else ""
    lines = [f"{runs} run{'s' * (runs != 1)}, {finished} finished{kind}"]
    constant = comparison.constant.items()
    same = [f"{key}={plain(value, key)}" for key, value in constant if UNREMARKABLE.get(key, ...) != value]
    lines.append(f"the same for all: {' '.join(item for item in same if len(item) <= LONGEST_CONSTANT)}")
    notes = []
    if any(rows[f"{metric}_vs_baseline"].notna().any() for metric in comparison.metrics):
        notes.append("(in parentheses: against accum_steps=1, seed by seed)")
    if (rows["finished"] > 1).any():
        notes.append("(±: standard deviation over the runs of a row)")
    return lines + ([" ".join(notes)] if notes else [])


def verdicts(comparison: Comparison) -> list[str]:
    """Say, for each reason there is, why which settings' gradients are as they are, and what else was noted."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for _, row in comparison.rows.iterrows():
        label = " ".join(f"{key}={short(plain(row[key], key))}" for key in comparison.settings if not missing(row[key]))
        for kind, words in ((row["verdict"], row["verdict_reason"]), ("note", row["notes"])):
            if words:
                by_reason.setdefault((kind, words), []).append(label)
    return [f"{verdict}: {reason}{_of(labels)}" for (verdict, reason), labels in by_reason.items()]


def recommendations(comparison: Comparison) -> list[str]:
    """Say which setting to take, by which rule, and which are worth a look."""
    found = advise(comparison)
    if not found:
        return []
    lines = []
    for advice in found:
        shared = " ".join(f"{key}={short(plain(value, key))}" for key, value in advice.others.items())
        front = ", ".join(map(str, advice.front))
        lines.append(
            f"{'nothing to take' if advice.choice is None else 'take'}{shared and f' for {shared}'}: {advice.why}"
            + (f"; Pareto front of memory and speed: accum_steps={front}" if len(advice.front) > 1 else "")
        )
    return [*lines, RULE]


def plain(value: Any, key: str) -> str:
    """Return a setting as one would type it; whole numbers that pandas keeps as floats are whole again."""
    if key in BYTES:
        return show_bytes(value).replace(" ", "")
    return str(int(value)) if isinstance(value, float) and value.is_integer() and 1 <= abs(value) < 1e15 else str(value)


def short(text: str) -> str:
    """Return `text` cut to what a cell takes."""
    return text if len(text) <= LONGEST_CONSTANT else f"{text[: LONGEST_CONSTANT - 1]}…"


def _of(labels: Sequence[str]) -> str:
    named = [label for label in labels if label]
    more = f" and {len(named) - MANY} more" if len(named) > MANY else ""
    return f" ({', '.join(named[:MANY])}{more})" if named else ""
