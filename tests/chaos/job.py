"""A real `trainmover run` under test: its events as they happen, its processes, its end."""

import asyncio
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tests.integration.command import ORPHANS_WITHIN_S, TRAINMOVER, carriers
from trainmover.bus.server import EmbeddedServer

SCRIPTS = Path(__file__).parent / "scripts"

Event = dict[str, Any]


@dataclass
class Finished:
    """What a run left: its report, exit code and output, and a digest per rank and step."""

    report: dict[str, Any]
    code: int
    output: str
    digests: dict[tuple[int, int], str]
    ledger: dict[tuple[int, int], list[int]]

    @property
    def state(self) -> str:
        return str(self.report["state_digest"])


@dataclass
class Job:
    """Use as a context manager: whatever happens, nothing of it stays."""

    folder: Path
    script: str
    nproc: int = 2
    standbys: int = 1
    script_args: tuple[str, ...] = ()
    run_args: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    """Added to the environment of everything that belongs to the job."""
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.name = f"t{os.getpid()}-{time.monotonic_ns() % 10**9}"
        self.environment = {
            **os.environ,
            "XDG_RUNTIME_DIR": str(self.folder / "xdg"),
            "PYTHONUNBUFFERED": "1",
            **self.variables,
        }

    def __enter__(self) -> "Job":
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("digests", "ledger", "xdg"):
            (self.folder / name).mkdir(exist_ok=True)
        self._output = (self.folder / "output").open("w+")
        self.process = self.start(
            *self._run(f"--report={self.folder / 'report.json'}"), output=self._output
        )
        self._cond = threading.Condition()
        self._reader = threading.Thread(target=self._follow, daemon=True)
        self._reader.start()
        return self

    def _run(self, *more: str) -> tuple[str, ...]:
        """The arguments of `trainmover run`, the same on every machine."""
        return (
            "run",
            f"--nproc-per-node={self.nproc}",
            f"--standbys={self.standbys}",
            f"--job={self.name}",
            f"--step-digests={self.folder / 'digests'}",
            f"--fault=@{self.folder / 'faults'}",
            "--max-incidents=100",
            *self.run_args,
            *more,
            self.script if "/" in self.script else str(SCRIPTS / self.script),
            *self.script_args,
        )

    def start(self, *arguments: str, output: TextIO) -> subprocess.Popen[bytes]:
        """A `trainmover` command in the job's environment."""
        return subprocess.Popen(
            [*TRAINMOVER, *arguments],
            env=self.environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def __exit__(self, *_: object) -> None:
        end(self.process)
        self._reader.join(10)
        self._output.close()

    # ---- what else belongs to it

    @contextmanager
    def machine(self, name: str) -> Iterator[subprocess.Popen[bytes]]:
        """The agent of one more machine of the job, ended with the block."""
        with self._beside(f"output-{name}", *self._run(f"--machine={name}")) as process:
            yield process

    @contextmanager
    def services(self, url: str, copy: str = "") -> Iterator[subprocess.Popen[bytes]]:
        """A `trainmover services`, ended with the block."""
        arguments = ("services", f"--bus={url}", f"--job={self.name}")
        logs = f"--log-dir={self.folder / f'services{copy}'}"
        with self._beside(f"output-services{copy}", *arguments, logs) as process:
            yield process

    @contextmanager
    def _beside(self, output: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / output).open("w+") as file:
            process = self.start(*arguments, output=file)
            try:
                yield process
            finally:
                end(process)

    # ---- what happens

    def _follow(self) -> None:
        """Events as `trainmover events --follow --json` prints them."""
        while not list((self.folder / "xdg").glob("trainmover/*.json")):
            if self.process.poll() is not None:
                return
            time.sleep(0.02)
        with subprocess.Popen(
            [*TRAINMOVER, "events", "--follow", "--json", "--job", self.name],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as follower:
            assert follower.stdout

            def end_with_the_job() -> None:
                self.process.wait()
                follower.terminate()

            threading.Thread(target=end_with_the_job, daemon=True).start()
            for line in follower.stdout:
                with self._cond:
                    self.events.append(json.loads(line))
                    self._cond.notify_all()

    def wait_for(self, what: str, condition: Callable[[], bool], timeout_s: float = 60) -> None:
        """Blocks until `condition` over `events` holds; fails with the output when it cannot."""
        deadline = time.monotonic() + timeout_s
        with self._cond:
            while not condition():
                left = deadline - time.monotonic()
                if left <= 0 or self.process.poll() is not None:
                    raise AssertionError(f"waited in vain for {what}\n{self.output()[-6000:]}")
                self._cond.wait(min(left, 0.5))

    def of(self, kind: str) -> list[Event]:
        return [e for e in list(self.events) if e["type"] == kind]

    def assignment(self) -> dict[int, str]:
        """Rank -> worker of the latest plan that is in force."""
        decided = {e["generation"] for e in self.of("migration.decided")}
        plans = self.of("layout.assigned") + [
            plan
            for plan in self.of("migration.planned")
            if plan["kind"] != "planned" or plan["generation"] in decided
        ]
        return {m["rank"]: m["worker"] for m in plans[-1]["members"]} if plans else {}

    def parked(self) -> list[str]:
        """Standbys that are warm and hold no rank."""
        plans, ends = self.of("migration.planned"), ("migration.decided", "migration.aborted")
        decided, aborted = ({e["generation"] for e in self.of(end)} for end in ends)
        pending = {p["generation"] for p in plans[-1:]} - aborted
        counted = [
            p for p in plans if p["kind"] != "planned" or p["generation"] in decided | pending
        ]
        held = {m["worker"] for p in counted for m in p["members"]}
        gone = {w for e in self.of("worker.failed") for w in e["workers"]}
        gone |= {one["worker"] for e in self.of("worker.exited") for one in e["exits"]}
        warm = dict.fromkeys(e["worker"] for e in self.of("standby.warmed") if e["resident"])
        return [worker for worker in warm if worker not in held | gone]

    def pid(self, worker: str) -> int:
        return next(int(e["pid"]) for e in self.of("worker.started") if e["worker"] == worker)

    def happened(self, kind: str, times: int) -> bool:
        return len(self.of(kind)) >= times

    def settled_without(self, gone: set[str]) -> bool:
        """Whether the latest plan has none of these workers and is completed."""
        plans, completed = self.of("migration.planned"), self.of("migration.completed")
        done = completed and completed[-1]["generation"] == plans[-1]["generation"]
        return bool(done) and not gone & set(self.assignment().values())

    def recovered(self, count: int) -> None:
        """Blocks until `count` interruptions have ended well."""
        self.wait_for(f"recovery {count}", lambda: len(self.of("migration.completed")) >= count, 90)

    def sockets(self, worker: str) -> set[str]:
        """Inodes of a worker's sockets, as the kernel has them."""
        found = set()
        for entry in Path(f"/proc/{self.pid(worker)}/fd").iterdir():
            with suppress(FileNotFoundError):  # a file that the worker has just closed
                found.add(os.readlink(entry))
        return {link for link in found if link.startswith("socket:")}

    # ---- what the test does to it

    def pace(self, step: int) -> None:
        """Let the script's rank 0 go on up to this step."""
        temporary = self.folder / "pace.new"
        temporary.write_text(str(step))
        temporary.rename(self.folder / "pace")

    def inject(self, fault: str) -> None:
        with (self.folder / "faults").open("a") as out:
            out.write(fault + "\n")

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def finish(self, timeout_s: float = 120) -> Finished:
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job hangs\n{self.output()[-6000:]}") from None
        deadline = time.monotonic() + ORPHANS_WITHIN_S
        while left := carriers(self.name):
            assert time.monotonic() < deadline, f"orphans: {left}"
            time.sleep(0.05)
        path = self.folder / "report.json"
        report = json.loads(path.read_text()) if path.exists() else {}
        return Finished(
            report=report,
            code=code,
            output=self.output(),
            digests=_by_step(self.folder / "digests", "digest"),
            ledger=_by_step(self.folder / "ledger", "samples"),
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """In order, else at once."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def child(parent: int, word: str, timeout_s: float = 10) -> int:
    """Pid of the child with `word` in its command line; blocks while it is being started again."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with suppress(OSError):  # it has just ended
            for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
                if word in Path(f"/proc/{pid}/cmdline").read_text():
                    return int(pid)
        time.sleep(0.01)
    raise AssertionError(f"no {word} is a child of {parent}")


def descendants(pid: int) -> set[int]:
    """Every process below `pid`."""
    found: set[int] = set()
    with suppress(OSError):  # it has just ended
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found |= {int(child)} | descendants(int(child))
    return found


class Bus:
    """A nats-server of the test's own, which may be killed and started on its store and port."""

    def __init__(self, folder: Path) -> None:
        self._server = EmbeddedServer(folder)
        self._runner = asyncio.Runner()

    def __enter__(self) -> "Bus":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._server.stop())
        self._runner.close()

    @property
    def url(self) -> str:
        return self._server.url

    def start(self) -> None:
        self._runner.run(self._server.start())

    def kill(self) -> None:
        os.kill(self._server.pid, signal.SIGKILL)
        self._runner.run(self._server.wait())


def assert_each_decision_once(run: Job) -> None:
    """Generations grow by one, nothing about one of them or a death is said twice, and no event
    came twice."""
    planned = [e["generation"] for e in run.of("migration.planned")]
    assert planned == list(range(2, len(planned) + 2))
    for kind in ("decided", "switched", "completed", "aborted"):
        generations = [e["generation"] for e in run.of(f"migration.{kind}")]
        assert sorted(set(generations)) == sorted(generations), f"{kind} twice: {generations}"
    failed = [worker for e in run.of("worker.failed") for worker in e["workers"]]
    assert len(set(failed)) == len(failed), f"failed twice: {failed}"
    assert len(run.of("layout.assigned")) == len(run.of("job.started")) == 1
    seqs = [e["seq"] for e in run.events]
    assert seqs == list(range(1, len(seqs) + 1))


def _by_step(folder: Path, key: str) -> dict[tuple[int, int], Any]:
    """(rank, step) -> value; a step that was written twice must say the same."""
    found: dict[tuple[int, int], Any] = {}
    for path in sorted(folder.glob("rank*.jsonl")):
        rank = int(path.stem.removeprefix("rank"))
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            at = (rank, entry["step"])
            assert found.setdefault(at, entry[key]) == entry[key], f"{key} of {at} differs"
    return found


def assert_same(disturbed: Finished, undisturbed: Finished) -> None:
    """Bit-identical at the end, and step by step: the first that differs is named."""
    assert disturbed.code == 0, disturbed.output[-6000:]
    for at in sorted(undisturbed.digests, key=lambda at: (at[1], at[0])):
        rank, step = at
        if at in disturbed.digests:
            assert disturbed.digests[at] == undisturbed.digests[at], (
                f"rank {rank} differs for the first time after step {step}\n"
                f"{disturbed.output[-6000:]}"
            )
    assert disturbed.state == undisturbed.state, disturbed.output[-6000:]
    assert disturbed.report["completed_steps"] == undisturbed.report["completed_steps"]
    for at, samples in undisturbed.ledger.items():
        assert disturbed.ledger.get(at, samples) == samples, f"samples of {at} differ"
