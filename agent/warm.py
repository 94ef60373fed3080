"""The warm process: imports once what every worker needs, then forks workers on order.

A fork from here costs 25 ms, where a fresh interpreter that imports torch costs seconds
(design/standby.md). It stays single-threaded: a child of a process with an OpenMP pool hangs in
its first parallel region, so with a second thread workers are spawned instead.
"""

import gc
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass

from trainmover.agent.child import Pipes, become, exec_python
from trainmover.agent.imports import import_ahead, num_threads, source_of, top_level
from trainmover.agent.orders import (
    MAX_BYTES,
    ORDER,
    Exited,
    Program,
    Ready,
    Signal,
    Start,
    Started,
)
from trainmover.bus.lifeline import die_with
from trainmover.telemetry import spans

RUNTIME = "trainmover.runtime.run"
"""`import trainmover` is lazy: a script that names it will need this, and torch with it."""
TRACES = "trainmover.telemetry.otel"
"""What a worker imports if its spans are wanted."""
LAZY = "torch._dynamo"
"""What torch imports in an optimizer's constructor: 800 modules, seconds in every worker."""


@dataclass(frozen=True, slots=True)
class _Worker:
    name: str
    pid: int
    pidfd: int


@dataclass(frozen=True, slots=True)
class Birth:
    """What a forked child carries out of the server's loop."""

    order: Start
    pipes: Pipes


class Server:
    """Serves orders until the agent's end of the channel closes."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        self._workers: dict[str, _Worker] = {}

    def serve(self) -> Birth | None:
        """Returns None when the agent is gone, and a Birth in every child it forked."""
        while True:
            for key, _ in self._selector.select():
                if isinstance(key.data, _Worker):
                    self._reap(key.data)
                    continue
                data, fds, _, _ = socket.recv_fds(self._channel, MAX_BYTES, 2)
                if not data:
                    self._kill_all()
                    return None
                match ORDER.validate_json(data):
                    case Start() as order:
                        birth = self._fork(order, Pipes(*fds))
                        if birth is not None:
                            return birth
                    case Signal(worker=worker, number=number) if worker in self._workers:
                        signal.pidfd_send_signal(self._workers[worker].pidfd, number)
                    case Signal():
                        pass  # it has exited, and its report is under way

    def _fork(self, order: Start, pipes: Pipes) -> Birth | None:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            die_with(parent)
            self._forget()
            return Birth(order, pipes)
        os.close(pipes.stdout)
        os.close(pipes.stderr)
        worker = _Worker(order.worker, pid, os.pidfd_open(pid))
        self._workers[order.worker] = worker
        self._selector.register(worker.pidfd, selectors.EVENT_READ, worker)
        self._channel.send(Started(worker=worker.name, pid=pid).model_dump_json().encode())
        return None

    def _reap(self, worker: _Worker) -> None:
        """Kill what the worker left behind while its group cannot be anyone else's, then reap."""
        os.waitid(os.P_PIDFD, worker.pidfd, os.WEXITED | os.WNOWAIT)
        _kill_group(worker.pid)
        result = os.waitid(os.P_PIDFD, worker.pidfd, os.WEXITED)
        assert result is not None  # without WNOHANG there is always one
        self._selector.unregister(worker.pidfd)
        os.close(worker.pidfd)
        del self._workers[worker.name]
        code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        self._channel.send(Exited(worker=worker.name, code=code).model_dump_json().encode())

    def _kill_all(self) -> None:
        for worker in self._workers.values():
            _kill_group(worker.pid)

    def _forget(self) -> None:
        """In a child: close what belongs to the server."""
        self._selector.close()
        self._channel.close()
        for worker in self._workers.values():
            os.close(worker.pidfd)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def main(argv: list[str]) -> None:
    """`warm <channel fd> <Program as JSON>`; started by an agent only."""
    gc.disable()  # until a worker runs: imports are faster, and shared pages stay shared
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the agent decides what they mean
    pristine = dict(os.environ)
    channel = socket.socket(fileno=int(argv[0]))
    channel.set_inheritable(False)
    program = Program.model_validate_json(argv[1])
    sys.path[0] = (
        os.getcwd() if program.module else os.path.dirname(os.path.abspath(program.script))
    )
    began_s = time.monotonic()
    source, package = source_of(program.script, module=program.module)
    names = top_level(source, package)
    ahead = (RUNTIME, *names) if "trainmover" in names else names
    if spans.exporters(os.environ):
        ahead = (*ahead, TRACES)
    threads_from = import_ahead(ahead, num_threads)
    if "torch" in sys.modules and not threads_from:
        threads_from = import_ahead((LAZY,), num_threads)
    gc.freeze()  # a child's collector must not touch, and so copy, what is here already
    die_with(os.getppid(), 0)  # no longer: from here the agent's end is the channel's end
    ready = Ready(threads_from=threads_from, warm_s=time.monotonic() - began_s)
    channel.send(ready.model_dump_json().encode())
    birth = Server(channel).serve()
    if birth is None:
        os._exit(0)  # the agent waits, and nothing here needs an orderly end
    gc.enable()
    if threads_from:
        exec_python(program, {**pristine, **birth.order.variables}, birth.pipes)
    become(program, birth.order.variables, birth.pipes)


if __name__ == "__main__":
    main(sys.argv[1:])
