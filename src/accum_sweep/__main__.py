"""The front door: a verb, or else a run or multirun of Hydra's."""

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from accum_sweep import launch
from accum_sweep.errors import RunsFailed, UserError
from accum_sweep.verbs import VERBS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 1 runs failed, 2 bad input, 130 stopped by the user."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # of a scheduler or `timeout`: ends as Ctrl-C does
    try:
        _run(arguments)
        sys.stdout.flush()  # here, where a reader that has gone is understood
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except RunsFailed as failed:
        print(failed, file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except OSError as error:  # a full disk, a closed output
        print(error, file=sys.stderr)
        return 1
    return 0


def _run(arguments: Sequence[str]) -> None:
    if arguments and arguments[0] in VERBS:
        if launch.rank() > 0:  # of several processes one answers
            return
        VERBS[arguments[0]](arguments[1:])
    elif arguments == ["--version"]:
        from accum_sweep.environment import versions

        print(" ".join(f"{package} {number}" for package, number in versions().items()))
    else:
        from accum_sweep.app import main as hydra_main

        hydra_main(arguments)


def command() -> NoReturn:
    """Run the command line in a process that is there for nothing else."""
    launch.end(main())


if __name__ == "__main__":
    command()
