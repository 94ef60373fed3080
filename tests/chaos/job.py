"""A real `trainmover run` under test: its events as they happen, its processes, its end."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.command import ORPHANS_WITHIN_S, TRAINMOVER, carriers

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
    events: list[Event] = field(default_factory=list)

    def __enter__(self) -> "Job":
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("digests", "ledger", "xdg"):
            (self.folder / name).mkdir(exist_ok=True)
        self.name = f"t{os.getpid()}-{time.monotonic_ns() % 10**9}"
        self.environment = {
            **os.environ,
            "XDG_RUNTIME_DIR": str(self.folder / "xdg"),
            "PYTHONUNBUFFERED": "1",
        }
        script = self.script if "/" in self.script else str(SCRIPTS / self.script)
        command = [
            *TRAINMOVER,
            "run",
            f"--nproc-per-node={self.nproc}",
            f"--standbys={self.standbys}",
            f"--job={self.name}",
            f"--report={self.folder / 'report.json'}",
            f"--step-digests={self.folder / 'digests'}",
            f"--fault=@{self.folder / 'faults'}",
            "--max-incidents=100",
            *self.run_args,
            script,
            *self.script_args,
        ]
        self._output = (self.folder / "output").open("w+")
        self.process = subprocess.Popen(
            command, env=self.environment, stdout=self._output, stderr=subprocess.STDOUT
        )
        self._cond = threading.Condition()
        self._reader = threading.Thread(target=self._follow, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(10)
        self._output.close()

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
        """Rank -> worker of the latest plan."""
        plans = self.of("layout.assigned") + self.of("migration.planned")
        return {m["rank"]: m["worker"] for m in plans[-1]["members"]} if plans else {}

    def parked(self) -> list[str]:
        """Standbys that are warm and hold no rank."""
        held = {m["worker"] for p in self.of("migration.planned") for m in p["members"]}
        gone = {w for e in self.of("worker.failed") for w in e["workers"]}
        return [e["worker"] for e in self.of("standby.warmed") if e["worker"] not in held | gone]

    def pid(self, worker: str) -> int:
        return next(int(e["pid"]) for e in self.of("worker.started") if e["worker"] == worker)

    def happened(self, kind: str, times: int) -> bool:
        return len(self.of(kind)) >= times

    def settled_without(self, gone: set[str]) -> bool:
        """Whether the latest plan has none of these workers and is completed."""
        plan, completed = self.of("migration.planned")[-1], self.of("migration.completed")
        done = bool(completed) and completed[-1]["generation"] == plan["generation"]
        return done and not gone & set(self.assignment().values())

    def recovered(self, count: int) -> None:
        """Blocks until `count` interruptions have ended well."""
        self.wait_for(f"recovery {count}", lambda: len(self.of("migration.completed")) >= count, 90)

    def sockets(self, worker: str) -> set[str]:
        """Inodes of a worker's sockets, as the kernel has them."""
        folder = Path(f"/proc/{self.pid(worker)}/fd")
        links = (os.readlink(entry) for entry in folder.iterdir())
        return {link for link in links if link.startswith("socket:")}

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
