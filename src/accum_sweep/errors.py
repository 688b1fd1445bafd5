"""What goes wrong by the user's hand: one small family, shown without a traceback, with exit code 2."""

import difflib
import re
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LONGEST_TRACEBACK = 20_000  # characters

# What an address can hold: a token, or a user with a password, before its host; or a password among its parameters.
BEFORE_HOST = re.compile(
    r"(https?:/{0,2})\S*@|([a-z][\w+.-]*:?/{1,2})[^\s:]*:\S*@|()[^\s=:\[\]'\"]*:(?!/)[^\s=\[\]'\"]*@", re.I
)
PARAMETER = re.compile(r"\b(\w*(?:password|passwd|secret)|pwd|token|access_token)=[^&\s;,'\"]+", re.I)


class UserError(Exception):
    """A mistake the user can mend. The message says what, and what to do."""


@dataclass(frozen=True)
class Fault:
    """One broken rule of a configuration."""

    key: str
    value: object
    rule: str
    remedy: str

    def __str__(self) -> str:
        value = "null" if self.value is None else self.value
        return without_secrets(f"{self.key}={value}: {self.rule}; {self.remedy}")


class ConfigError(UserError):
    """Every fault of a configuration at once, one a line."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(
            {str(fault): fault for fault in faults}.values()
        )  # a sweep meets the same one again and again
        super().__init__("\n".join(map(str, self.faults)))


def without_secrets(text: str) -> str:
    """Return `text` with what may be a password masked."""
    text = BEFORE_HOST.sub(lambda found: f"{found[1] or found[2] or ''}***@", text)
    return PARAMETER.sub(lambda found: f"{found[1]}=***", text)


def traceback_of(error: BaseException) -> str:
    """Return an error's traceback, the end of it where it is long, with what may be a password masked."""
    return without_secrets("".join(traceback.format_exception(error)))[-LONGEST_TRACEBACK:].strip()


def nearest(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return "did you mean X?" for the known word closest to `word`, or `otherwise` if none is close."""
    by_end = {name.rpartition(".")[2]: name for name in sorted(known)}  # a shared "problem." is no likeness
    close = difflib.get_close_matches(word.rpartition(".")[2], by_end, n=1, cutoff=0.55)
    return f"did you mean {by_end[close[0]]}?" if close else otherwise


class RunsFailed(Exception):  # noqa: N818 - it reports what happened, nothing is wrong with the call
    """Runs ended otherwise than finished. They have their records; the exit code is 1."""


class ProcessDied(Exception):  # noqa: N818 - it reports what happened
    """The process that a run had ended without a word. The message says how."""


def interrupted(error: BaseException | None) -> bool:
    """Tell whether a Ctrl-C is behind an error; OmegaConf wraps what it meets."""
    return error is not None and (
        isinstance(error, KeyboardInterrupt) or interrupted(error.__cause__) or interrupted(error.__context__)
    )
