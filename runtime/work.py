"""A collective that was handed out: its completion, its poisoning, and the thread it runs in."""

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from trainmover.runtime.admission import Issued
from trainmover.runtime.alarm import Alarm


class LinkWork(Work):
    """torch's handle of one collective; every method but `wait` returns at once.

    Ends once: finished, failed, or poisoned. A poisoned work is complete for torch, so that DDP's
    reducer and autograd stay usable; its floating outputs are as they were and its integer outputs
    zero (design/commit.md, poison).
    """

    def __init__(self, issued: Issued, outputs: list[Tensor]) -> None:
        super().__init__()
        self.issued = issued
        self._outputs = outputs
        self.help: Callable[[], None] | None = None
        """Runs it in the calling thread if it is next in its lane; else does nothing."""
        self.hurry: Callable[[], None] | None = None
        """Has its lane begin at once: nobody will help, or it is not next."""
        self._lock = threading.Lock()
        self._ended = False
        self._running = threading.Lock()  # held until it has ended: an Event costs 5 us more
        self._running.acquire()
        self._spoiled = False
        self._error: BaseException | None = None
        self._told: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[list[Tensor]] | None = None

    def spoil(self) -> None:
        """Zero the integer outputs, unless it has ended; whatever comes now is a poisoned end."""
        with self._lock:
            if self._ended or self._spoiled:
                return
            self._spoiled = True
            with torch.inference_mode():
                for tensor in self._outputs:
                    if not (tensor.is_floating_point() or tensor.is_complex()):
                        tensor.zero_()

    def end(self, error: BaseException | None = None) -> bool:
        """Complete it, with `error` where it failed; False when it was poisoned."""
        with self._lock:
            self._error = None if self._spoiled else error
            self._ended, self.help, self.hurry = True, None, None
            self._running.release()
            told = self._told
        if told is not None:
            told.set_result(None)
        return not self._spoiled

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it has ended, `timeout` at most (None and zero: no limit but its own)."""
        limit_s = timeout.total_seconds() if timeout else -1
        if limit_s < 0 and (help_it := self.help) is not None:
            help_it()
        if not self.is_completed() and self._running.acquire(timeout=limit_s):
            self._running.release()
        if not self._ended:
            raise TimeoutError(
                f"expected {self.issued.op} of group {self.issued.group} within {limit_s} s, "
                "it is still running: wait longer, or find the member that is not in it"
            )
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """The same as `wait` on CPU."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended."""
        if (hurry := self.hurry) is not None:
            self.hurry = None
            hurry()
        return self._ended

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return self._ended and self._error is None

    def result(self) -> list[Tensor]:
        """The tensors it wrote."""
        return self._outputs

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        """A future of the tensors it wrote, or of a RuntimeError that says its error."""
        with self._lock:
            if self._future is not None:
                return self._future
            # not set_exception(): C++ (DDP) would take the exception for tensors and crash
            told = self._told = torch.futures.Future()
            future = self._future = told.then(self._outcome)
            ended = self._ended
        if ended:
            told.set_result(None)
        elif (hurry := self.hurry) is not None:  # whoever waits for a future does not help
            hurry()
        return future

    def _outcome(self, _: "torch.futures.Future[None]") -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._outputs


class Lane:
    """One FIFO of jobs, which must not raise, one at a time.

    They run in a thread of its own, started at the first. Handing a job over costs up to a switch
    interval when pure Python runs (design/groups.md, GIL), so who will wait for it anyway runs it
    in the own thread: `claim` an idle lane, or `help` with a job that is next. The thread leaves
    time for that: it begins a little later, or when told to `hurry`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._busy = self._closing = False
        self._alarm: Alarm | None = None
        self._thread: threading.Thread | None = None

    def claim(self) -> bool:
        """Take the lane for the calling thread if nothing waits or runs in it."""
        with self._lock:
            if self._busy or self._jobs:
                return False
            self._busy = True
            return True

    def release(self) -> None:
        """Give a claimed lane back."""
        with self._lock:
            self._busy = False
            if self._alarm and (self._jobs or self._closing):
                self._alarm.now()

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` after those before it. Does not block."""
        with self._lock:
            if self._alarm is None:
                self._alarm = Alarm()
                self._thread = threading.Thread(
                    target=self._run, args=(self._alarm,), name=self._name, daemon=True
                )
                self._thread.start()
            self._jobs.append(job)
            if len(self._jobs) == 1:  # else it is set, or whoever runs looks for the next
                self._alarm.soon()

    def hurry(self) -> None:
        """Have the thread begin at once with what waits."""
        with self._lock:
            if self._alarm and self._jobs:
                self._alarm.now()

    def help(self, job: Callable[[], None]) -> None:
        """Run `job` in the calling thread if it is next and nothing runs."""
        if self._take(job):
            try:
                job()
            finally:
                self.release()

    def close(self, deadline_s: float) -> None:
        """End the thread; raises TimeoutError when its jobs do not end within `deadline_s`."""
        if self._thread is None or self._alarm is None:
            return
        with self._lock:
            self._closing = True
            self._alarm.now()
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"expected thread {self._name} to end within {deadline_s} s: revoke the generation "
                "before closing its groups"
            )
        with self._lock:
            self._alarm.close()
            self._alarm = self._thread = None

    def _take(self, job: Callable[[], None] | None = None) -> Callable[[], None] | None:
        with self._lock:
            if self._busy or not self._jobs or (job is not None and self._jobs[0] is not job):
                return None
            self._busy = True
            taken = self._jobs.popleft()
            if job is not None and self._alarm and not self._jobs and not self._closing:
                self._alarm.off()
            return taken

    def _run(self, alarm: Alarm) -> None:
        while True:
            alarm.wait()
            while (job := self._take()) is not None:
                job()
                with self._lock:
                    self._busy = False
            with self._lock:
                if self._closing and not self._jobs and not self._busy:
                    return
