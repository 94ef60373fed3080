"""A thread's wake-up call, at once or a little later: a timerfd, which Python has from 3.13 on."""

import ctypes
import os
import time

SOON_S = 100e-6
"""As long as a thread waits for the interpreter's lock while another one runs (run.py)."""

_libc = ctypes.PyDLL(None, use_errno=True)  # keeps the lock: none of these calls blocks


class _Setting(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "in_s", "in_ns")]


_settime = _libc.timerfd_settime
_settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.POINTER(_Setting), ctypes.c_void_p)
_NOW, _SOON, _OFF = (ctypes.pointer(_Setting(in_ns=ns)) for ns in (1, int(SOON_S * 1e9), 0))


class Alarm:
    """Set by any thread, waited for by one. The last setting counts, until it was waited for."""

    def __init__(self) -> None:
        self._fd: int = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")

    def now(self) -> None:
        """Have `wait` return at once."""
        _settime(self._fd, 0, _NOW, None)

    def soon(self) -> None:
        """Have `wait` return after SOON_S."""
        _settime(self._fd, 0, _SOON, None)

    def off(self) -> None:
        """Have `wait` block."""
        _settime(self._fd, 0, _OFF, None)

    def wait(self) -> None:
        """Block until the time has come that was set."""
        os.read(self._fd, 8)

    def close(self) -> None:
        """Release the descriptor; nobody may wait."""
        os.close(self._fd)
