"""The one way out of every command: a sentence on stderr and a documented exit code, no traceback for a mistake."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rm_optimizer.errors import DataStalled, DiskError, Interrupted, RMOptimizerError

CLOSED_OUTPUT = 141
"""Exit code where the reader of standard output went away: 128 + SIGPIPE, as shells have it."""
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID")


@contextmanager
def one_exit() -> Iterator[None]:
    """End the process with a sentence and its exit code where the block fails for a reason that a user can mend.

    A mistake in options, data or model, a file that the system does not let us write, Ctrl-C and a closed standard
    output are such reasons. Everything else rises: it is a bug, and keeps its traceback.

    Raises:
        SystemExit: with the exit code.
    """
    _replace_what_a_terminal_cannot_show()
    try:
        yield
        sys.stdout.flush()
    except RMOptimizerError as error:
        sys.exit(report(error))
    except KeyboardInterrupt:
        sys.exit(report(Interrupted("stopped")))
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # rich and click end the process by themselves
            sys.exit(_output_closed())
        raise
    except Exception as error:
        if (code := _system_refusal(error)) is None:
            raise
        sys.exit(code)


def report(error: RMOptimizerError) -> int:
    """Write the error's sentence to stderr and return the exit code.

    Every process of a distributed run meets the same mistake, so only the first speaks; a stalled data loader is met
    by one process alone, which then speaks for itself.
    """
    if rank() == 0 or isinstance(error, DataStalled):
        print(f"error: {error}", file=sys.stderr)
    return error.exit_code


def rank() -> int:
    """This process's number in a distributed run, as torchrun, Lightning and SLURM tell it."""
    return int(next((os.environ[name] for name in RANK_VARIABLES if os.environ.get(name)), 0))


def _system_refusal(error: Exception) -> int | None:
    """The exit code where the system refused a file or the standard output, after the sentence; None for a bug."""
    refused = _output_refusal() if isinstance(error, OSError) and error.filename is None else None
    if isinstance(refused, BrokenPipeError):
        return _output_closed()
    if refused is not None:
        _discard_output()
        return report(DiskError(f"standard output cannot be written ({refused.strerror})"))
    from rm_optimizer.records.disk import disk_error

    found = disk_error(error)
    return None if found is None else report(found)


def _output_refusal() -> OSError | None:
    """Error of one more line break on standard output, since errors of streams do not name the stream."""
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"\n")
    except OSError as refused:
        return refused
    return None


def _output_closed() -> int:
    _discard_output()
    with suppress(OSError):
        print("error: standard output was closed before all of it was written", file=sys.stderr)
    return CLOSED_OUTPUT


def _discard_output() -> None:
    """Point standard output at nothing, so that Python's own last flush does not fail once more."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _replace_what_a_terminal_cannot_show() -> None:
    """Print a question mark for a character that the streams' encoding lacks, instead of failing over it."""
    for stream in (sys.stdout, sys.stderr):
        if not (stream.encoding or "").lower().replace("-", "").startswith("utf") and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
