"""A child that dies with its parent, also when the parent is killed with SIGKILL (Linux)."""

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
