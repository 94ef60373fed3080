"""A child dies with its parent, also when SIGKILL takes that one (Linux), or is ended by it."""

import asyncio
import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # loaded here: between fork and exec is too late


def die_with(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to send us `signum` when the parent ends; at once if it already has.

    The kernel means the parent's *thread* that started us: start children from one that stays.
    Raises OSError. Source: prctl(2), PR_SET_PDEATHSIG.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it ended before the call
        os.kill(os.getpid(), signum)


async def end(process: asyncio.subprocess.Process, within_s: float) -> None:
    """Ask a child to end, kill it after `within_s`; it may have ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    await gone(process, within_s)


async def gone(process: asyncio.subprocess.Process, within_s: float) -> None:
    """Wait for the end of a child, kill it after `within_s`."""
    try:
        await asyncio.wait_for(process.wait(), within_s)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):  # it ended just now
            process.kill()
        await process.wait()
