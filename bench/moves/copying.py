"""What the machine itself takes to copy as many bytes between as many pairs of processes at once.

A pair is connected by a Unix socket, as ranks of one machine are; its memory is touched before.
"""

import mmap
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe

from trainmover.bus.lifeline import die_with

LIMIT_S = 60.0
BUFFER_BYTES = 1 << 20
"""Of a socket, as our endpoints ask for."""


class Pairs:
    """Senders and receivers that wait for an order."""

    def __init__(self, pipes: list[tuple[Pipe, Pipe]]) -> None:
        self._pipes = pipes

    def copy(self, num_bytes: int, pairs: int) -> float:
        """Seconds from the order until the last of `pairs` receivers has all its bytes; blocks."""
        asked = self._pipes[:pairs]
        for _, receiver in asked:
            receiver.send(num_bytes)
        for _, receiver in asked:
            self._answer(receiver)  # its memory is there
        began_s = time.perf_counter()
        for sender, _ in asked:
            sender.send(num_bytes)
        return max(self._answer(receiver) for _, receiver in asked) - began_s

    def _answer(self, pipe: Pipe) -> float:
        if not pipe.poll(LIMIT_S):
            raise SystemExit(f"planned: a raw copy was not done within {LIMIT_S:g} s")
        found: float = pipe.recv()
        return found


@contextmanager
def started(pairs: int, max_bytes: int) -> Iterator[Pairs]:
    """Forks the processes, each with `max_bytes` of touched memory; ended with the block."""
    context = multiprocessing.get_context("fork")
    processes, pipes = [], []
    for _ in range(pairs):
        ends = socket.socketpair(socket.AF_UNIX)
        ours = []
        for serve, sock in zip((_send, _receive), ends, strict=True):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(sock, theirs, max_bytes), daemon=True)
            process.start()
            processes.append(process)
            ours.append(mine)
            theirs.close()
        pipes.append((ours[0], ours[1]))
        for sock in ends:
            sock.close()
    try:
        yield Pairs(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _memory(size: int) -> memoryview:
    memory = memoryview(mmap.mmap(-1, size))
    for at in range(0, size, mmap.PAGESIZE):
        memory[at] = 1
    return memory


def _send(sock: socket.socket, pipe: Pipe, size: int) -> None:
    die_with(os.getppid())
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    memory = _memory(size)
    while True:
        sock.sendall(memory[: pipe.recv()])


def _receive(sock: socket.socket, pipe: Pipe, size: int) -> None:
    die_with(os.getppid())
    memory = _memory(size)
    while True:
        window = memory[: pipe.recv()]
        pipe.send(0.0)
        at = 0
        while at < len(window):
            at += sock.recv_into(window[at:])
        pipe.send(time.perf_counter())
