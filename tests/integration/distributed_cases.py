"""Runs cases of torch's own DistributedTest on four ranks, one JSON line for each:

    python -m tests.integration.distributed_cases [--backend gloo] [--verbose] [CASE...]

No case: all of them. torch's harness spawns four interpreters for each; here four ranks are forked
from a process that has imported everything. Cases ask the backend for its name to know what to
expect of it: ours goes by the name of gloo, and is held to its promises for CPU tensors.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
import traceback
import unittest
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

RANKS = 4
os.environ.update(BACKEND="gloo", WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from tests.integration.cluster import Node  # noqa: E402
from torch._C._distributed_c10d import HashStore  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402
from torch.testing._internal import common_distributed, common_utils  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

from trainmover.runtime.backend import BACKEND  # noqa: E402

CASE_S = 90.0
"""One case at most."""


@dataclass(frozen=True)
class Outcome:
    case: str
    result: str
    """passed, skipped or failed."""
    seconds: float
    text: str = ""
    """Why."""


class Cases(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """The cases as torch writes them."""

    everyone: Any
    """A barrier of the ranks' processes; torch's own polls files."""

    def _barrier(self, wait_for: int = RANKS, timeout: float = 10) -> None:
        self.everyone.wait(CASE_S)  # torch's limits are for a quiet machine


# below eight ranks torch leaves cases about groups to MPI; four ranks are enough for them
os.environ["BACKEND"] = "mpi"
# torch's own lists of who records collectives for its profiler; ours does not
distributed_test.PROFILING_SUPPORTED_BACKENDS.clear()
distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.clear()


def run_case(name: str, backend: str) -> Outcome:
    """`name` on four forked ranks; a rank that fails ends the others."""
    began = time.monotonic()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        for each in ("test_dir", "barrier", "init_dir"):
            (Path(folder) / each).mkdir()
        os.environ["TEMP_DIR"] = folder
        pipes, processes = [], []
        Cases.everyone = context.Barrier(RANKS)
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(name, backend, rank, folder, theirs))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            results = _answers(pipes, began + CASE_S)
        finally:
            for process in processes:
                process.kill()
                process.join()
    seconds = round(time.monotonic() - began, 2)
    for result, text in results:
        if result == "failed":
            return Outcome(name, result, seconds, text)
    return Outcome(name, results[0][0], seconds, results[0][1])


def _answers(pipes: list[Pipe], deadline: float) -> list[tuple[str, str]]:
    """(result, why) of the ranks that finished; of the first alone, if one failed."""
    addresses = {}
    results = []
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), max(0, deadline - time.monotonic()))
        if not ready:
            return [("failed", f"rank {min(waiting.values())} did not end in {CASE_S} s")]
        for pipe in ready:
            assert isinstance(pipe, Pipe)
            try:
                kind, said = pipe.recv()
            except EOFError:
                return [("failed", f"rank {waiting[pipe]} died")]
            if kind == "addresses":
                addresses[f"w{waiting[pipe]}"] = said
                if len(addresses) == RANKS:
                    for each in pipes:
                        each.send(addresses)
            elif kind == "failed":
                return [(kind, f"rank {waiting[pipe]}: {said}")]
            else:
                results.append((kind, said))
                del waiting[pipe]
    return results


def _rank(name: str, backend: str, rank: int, folder: str, pipe: Pipe) -> None:
    torch.set_num_threads(1)
    try:
        if backend == "gloo":
            pipe.send(("addresses", ()))
            pipe.recv()
            _gloo(rank, folder, name)
        else:
            node = Node(f"w{rank}", rank, RANKS, Path(folder), pipe)
            pipe.send(("addresses", node.endpoint.addresses))
            workers = {r: f"w{r}" for r in range(RANKS)}
            node.switch(1, workers, pipe.recv(), *workers)
            node.wiring.timeout_s = CASE_S
            _go_by_the_name_of_gloo()
        pipe.send(_run(name, rank, folder))
        pipe.recv()  # links stay until all have finished
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))


def _gloo(rank: int, folder: str, name: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=distributed_test.CUSTOM_PG_TIMEOUT.get(name, 60)),
    )


def _go_by_the_name_of_gloo() -> None:
    """Also for WORLD of a case that initialises torch.distributed again."""
    initialise = dist.init_process_group

    def init_process_group(**given: Any) -> None:
        initialise(
            BACKEND,
            store=HashStore(),
            rank=given["rank"],
            world_size=given["world_size"],
            timeout=given["timeout"],
        )
        name_world()

    def name_world() -> None:
        world, known = dist.group.WORLD, distributed_c10d._world
        assert world is not None
        known.pg_map[world] = ("gloo", known.pg_map[world][1])
        known.pg_backend_config[world] = "cpu:gloo"

    dist.init_process_group = init_process_group  # type: ignore[assignment]
    name_world()


def _run(name: str, rank: int, folder: str) -> tuple[str, str]:
    case: Any = Cases(name)
    case.rank, case.file_name = rank, f"{folder}/file"
    common_utils.set_rng_seed()  # type: ignore[no-untyped-call]
    skips = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}
    try:
        getattr(case, name)()
        case._barrier()
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except SystemExit as end:
        if end.code not in skips:
            raise
        return "skipped", skips[end.code]
    return "passed", ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default=BACKEND, choices=[BACKEND, "gloo"])
    parser.add_argument("--verbose", action="store_true", help="what the ranks print, on stderr")
    parser.add_argument("cases", nargs="*")
    args = parser.parse_args()
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2 if args.verbose else os.open(os.devnull, os.O_WRONLY), 1)
    if not args.verbose:
        os.dup2(1, 2)
    for name in args.cases or unittest.TestLoader().getTestCaseNames(Cases):
        print(json.dumps(asdict(run_case(name, args.backend))), file=lines)


if __name__ == "__main__":
    main()
