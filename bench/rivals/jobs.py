"""The compared systems as running jobs: how each is started, looked at and ended."""

import json
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from children import Child, Supervised
from environment import rivals_python, variables
from ledger import COMMIT, RANKS, Line, Tail

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".bench"
PHASES = {
    "worker.failed": "detected",
    "migration.planned": "planned",
    "migration.decided": "prepared",
    "migration.switched": "switched",
}
"""Event of TrainMover -> the phase that it ends."""


@dataclass(frozen=True, slots=True)
class Kill:
    rank: int
    pid: int
    at_s: float
    """Seconds since 1970."""


class Job(Protocol):
    def ready(self, kills: int, lines: Sequence[Line]) -> bool:
        """Whether that is there which takes over after kill number `kills`, from 0."""

    def ended(self) -> str:
        """Empty while it runs, else what became of it."""

    def moments(self, kill: Kill, lines: Sequence[Line]) -> dict[str, float]:
        """What happened after a kill, in order, in seconds since 1970; `lines` are those after."""

    def own_deaths(self, kills: int) -> int:
        """How many processes ended that were not killed, where the system goes on after that."""

    def stop(self) -> None:
        """Ends every process of it. Blocks."""


class Migrated:
    """`trainmover run` with one standby, or more."""

    def __init__(
        self,
        folder: Path,
        *script: str,
        standbys: int = 1,
        training: str = "migrated.py",
        options: Sequence[str] = (),
    ) -> None:
        name = f"--job=bench-{os.getpid()}-{folder.name}"
        command = [sys.executable, "-m", "trainmover.cli.main"]
        run = [*command, "run", f"--nproc-per-node={RANKS}", f"--standbys={standbys}", name]
        kept = [f"--report={folder / 'report.json'}", f"--log-dir={folder / 'logs'}"]
        what = [HERE / training, f"--ledger={folder / 'ledger'}", *script]
        self.run = Child([*run, *kept, *options, *what], variables(), folder / "run.log")
        self.migrate = [*command, "migrate", name]
        """The command that moves a rank, but for the rank."""
        self.follow = [*command, "events", "--follow", "--json", name]
        self.seen = folder / "events.jsonl"
        self.tail = Tail(self.seen)
        self.watch: Child | None = None
        self.events: list[dict[str, Any]] = []
        """As the command prints them; `time_s` is when the bus stored it, in seconds since 1970."""

    def ready(self, kills: int, lines: Sequence[Line]) -> bool:
        if self.watch is None:  # steps are done, so the job can be found
            self.watch = Child(self.follow, variables(), self.seen)
        self.events += [json.loads(text) for text in self.tail.new()]
        return len([e for e in self.of("standby.warmed") if e["resident"]]) > kills

    def ended(self) -> str:
        return self.run.ended() or (self.watch.ended() if self.watch else "")

    def moments(self, kill: Kill, lines: Sequence[Line]) -> dict[str, float]:
        found: dict[str, float] = {}
        for event in self.events:
            if event["time_s"] > kill.at_s and event["type"] in PHASES:
                found[PHASES[event["type"]]] = event["time_s"]  # of several plans the last
        return found

    def own_deaths(self, kills: int) -> int:
        return len(self.of("worker.failed")) - kills

    def of(self, what: str) -> list[dict[str, Any]]:
        """The events of a type, so far."""
        return [event for event in self.events if event["type"] == what]

    def stop(self) -> None:
        self.run.stop()
        if self.watch is not None:
            self.watch.stop()


class Restarted:
    """torchrun: when a rank dies it ends all others and starts all again."""

    def __init__(self, folder: Path) -> None:
        self.memory = Path(tempfile.mkdtemp(prefix="recovery-", dir="/dev/shm"))
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        limits = [f"--nproc-per-node={RANKS}", "--max-restarts=1000"]
        kept = [f"--ledger={folder / 'ledger'}", f"--checkpoint={self.memory / 'checkpoint.pt'}"]
        command = [*launcher, *limits, HERE / "restarted.py", *kept]
        # Else the restarted ranks find addresses of the dead ones in the store that the launcher
        # keeps for all attempts, and never meet (issue 135712 of PyTorch).
        env = {**variables(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.run = Child(command, env, folder / "run.log")

    def ready(self, kills: int, lines: Sequence[Line]) -> bool:
        return True

    def ended(self) -> str:
        return self.run.ended()

    def moments(self, kill: Kill, lines: Sequence[Line]) -> dict[str, float]:
        """Each when the last rank was there."""
        names = {
            "started": "torn down and launched",
            "imported": "torch imported",
            "joined": "rendezvous",
            "loaded": "model, optimizer, checkpoint",
        }
        return {
            name: max(x.time_s for x in lines if x.what == what) for what, name in names.items()
        }

    def own_deaths(self, kills: int) -> int:
        return 0

    def stop(self) -> None:
        self.run.stop()
        shutil.rmtree(self.memory)


class Healed:
    """torchft: a lighthouse, and replica groups of one rank that are started again at once."""

    def __init__(
        self, folder: Path, lighthouse: Sequence[str], script: Sequence[str], spares: int = 0
    ) -> None:
        self.folder, self.spares = folder, spares
        python = rivals_python(CACHE)
        port = free_port()
        serve = [python.with_name("torchft_lighthouse"), "--min_replicas=1", f"--bind=[::]:{port}"]
        self.lighthouse = Child([*serve, *lighthouse], variables(), folder / "lighthouse.log")
        env = {**variables(), "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"}
        command = [python, HERE / "healed.py", f"--ledger={folder / 'ledger'}", *script]
        self.replicas = [
            Supervised([*command, f"--rank={rank}"], env, folder / f"rank{rank}.log")
            for rank in range(RANKS + spares)
        ]

    def ready(self, kills: int, lines: Sequence[Line]) -> bool:
        """All of them take part, spares included."""
        committed = {x.pid for x in lines if x.what == COMMIT}
        return all(replica.process.pid in committed for replica in self.replicas)

    def ended(self) -> str:
        return self.lighthouse.ended()

    def moments(self, kill: Kill, lines: Sequence[Line]) -> dict[str, float]:
        """Of the replica that was started again, which the others may not wait for; with a spare
        of the others, since it takes over."""
        if self.spares:
            others = [r for r in range(RANKS + self.spares) if r != kill.rank]
            return {"new quorum": max(self.reconfigured_s(r, kill.at_s) for r in others)}
        came = {x.what: x.time_s for x in lines if x.rank == kill.rank}
        return {
            "started again": self.replicas[kill.rank].starts[-1],
            "torch imported": came["imported"],
            "model, optimizer, manager": came["managed"],
            "new quorum": self.reconfigured_s(kill.rank, came["managed"]),
        }

    def reconfigured_s(self, rank: int, after_s: float) -> float:
        """When the replica was told of the first other quorum after that, by its log."""
        log = (self.folder / f"rank{rank}.log").read_text(errors="replace")
        times = re.findall(r"^(\d+\.\d+) torchft\.manager .* reconfiguring for", log, re.M)
        return next((float(t) for t in times if float(t) > after_s), after_s)

    def own_deaths(self, kills: int) -> int:
        return sum(len(replica.starts) - 1 for replica in self.replicas) - kills

    def stop(self) -> None:
        for child in (*self.replicas, self.lighthouse):
            child.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port
