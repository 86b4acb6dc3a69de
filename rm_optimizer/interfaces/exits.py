"""Common exit of all commands: one sentence on stderr and a documented exit code, no traceback for a user's mistake."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rm_optimizer.errors import DataStalled, DiskError, Interrupted, RMOptimizerError

CLOSED_OUTPUT = 141
"""Exit code if the reader of standard output has closed it: 128 + SIGPIPE, as in shells."""
_OF_OUTPUT = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Error numbers of a standard output that cannot be written; a refused connection, say, has another."""
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID")


@contextmanager
def one_exit() -> Iterator[None]:
    """End the process with a sentence and an exit code if the block fails for a reason that a user can fix.

    Such reasons are a mistake in options, data or model, a file that cannot be written, Ctrl-C and a closed standard
    output. Other exceptions are bugs and pass through with their traceback.

    Raises:
        SystemExit: with the exit code.
    """
    for stream in (sys.stdout, sys.stderr):  # a question mark for a character that their encoding lacks
        if not (stream.encoding or "").lower().replace("-", "").startswith("utf") and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked by `launch.become`
        yield
        sys.stdout.flush()
    except RMOptimizerError as error:
        sys.exit(report(error))
    except KeyboardInterrupt:
        sys.exit(report(Interrupted("stopped")))
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # rich and click exit on their own then
            sys.exit(_output_closed())
        raise
    except Exception as error:
        if (code := _system_refusal(error)) is None:
            raise
        sys.exit(code)


def report(error: RMOptimizerError) -> int:
    """Write the error's sentence to stderr and return the exit code.

    In a distributed run every process fails with the same mistake, so only the first one writes it. A stalled data
    loader may affect one process only, so each process writes its own.
    """
    if rank() == 0 or isinstance(error, DataStalled):
        print(f"error: {error}", file=sys.stderr)
    return error.exit_code


def rank() -> int:
    """Number of this process in a distributed run, from the variables of torchrun, Lightning and SLURM."""
    return int(next((os.environ[name] for name in RANK_VARIABLES if os.environ.get(name)), 0))


def _system_refusal(error: Exception) -> int | None:
    """Report that a file or standard output cannot be written, and return the exit code; None for a bug."""
    if isinstance(error, OSError) and error.filename is None and error.errno in _OF_OUTPUT:
        try:  # the error does not name its stream, so one more line break is written to standard output
            sys.stdout.flush()
            os.write(sys.stdout.fileno(), b"\n")
        except BrokenPipeError:
            return _output_closed()
        except OSError as refused:
            _discard_output()
            return report(DiskError(f"standard output cannot be written ({refused.strerror})"))
    from rm_optimizer.records.files import disk_error

    found = disk_error(error)
    return None if found is None else report(found)


def _output_closed() -> int:
    _discard_output()
    with suppress(OSError):
        print("error: standard output was closed before all of it was written", file=sys.stderr)
    return CLOSED_OUTPUT


def _discard_output() -> None:
    """Redirect standard output to the null device, so that Python's last flush does not fail again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
