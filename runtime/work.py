"""A collective that was handed out: its completion, its poisoning, and the thread it runs in."""

import queue
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from trainmover.runtime.admission import Issued


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
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._spoiled = False
        self._error: BaseException | None = None
        self._future: torch.futures.Future[list[Tensor]] | None = None

    def spoil(self) -> None:
        """Zero the integer outputs, unless it has ended; whatever comes now is a poisoned end."""
        with self._lock:
            if self._ended.is_set() or self._spoiled:
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
            self._ended.set()
            future = self._future
        if future is not None:
            self._tell(future)
        return not self._spoiled

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it has ended, `timeout` at most (None and zero: no limit but its own)."""
        limit_s = timeout.total_seconds() if timeout else None
        if not self._ended.wait(limit_s):
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
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return self._ended.is_set() and self._error is None

    def result(self) -> list[Tensor]:
        """The tensors it wrote."""
        return self._outputs

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        """A future of the tensors it wrote."""
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = torch.futures.Future()
            ended = self._ended.is_set()
        if ended:
            self._tell(future)
        return future

    def _tell(self, future: "torch.futures.Future[list[Tensor]]") -> None:
        if isinstance(self._error, Exception):
            future.set_exception(self._error)  # type: ignore[arg-type]
        else:
            future.set_result(self._outputs)


class Lane:
    """One FIFO of jobs with a thread of its own, started at the first; jobs must not raise.

    A caller that will wait for its job anyway may `claim` an idle lane and run the job itself:
    handing it to a thread costs up to a switch interval when pure Python runs (design/groups.md,
    GIL).
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._busy = threading.Lock()
        self._waiting = 0
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def claim(self) -> bool:
        """Take the lane for the calling thread if nothing waits or runs in it."""
        with self._lock:
            if self._waiting or not self._busy.acquire(blocking=False):
                return False
            self._waiting += 1
            return True

    def release(self) -> None:
        """Give a claimed lane back."""
        self._busy.release()
        with self._lock:
            self._waiting -= 1

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` in the lane's thread, after those before it. Does not block."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._waiting += 1
            self._jobs.put(job)

    def close(self, deadline_s: float) -> None:
        """End the thread; raises TimeoutError when its job does not end within `deadline_s`."""
        if self._thread is None:
            return
        self._jobs.put(None)
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"expected thread {self._name} to end within {deadline_s} s: revoke the generation "
                "before closing its groups"
            )

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._busy:
                job()
            with self._lock:
                self._waiting -= 1
