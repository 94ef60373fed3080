"""What an agent is told at its start."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trainmover.agent.orders import Program
from trainmover.schemas.environment import WorkerEnvironment

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Settings:
    job: str
    run: str
    machine: str
    program: Program
    layout: str
    bus: str
    """URL that the workers reach the bus at."""
    directory: Path
    """This run's folder for sockets; short, since a socket's path has 107 bytes at most."""
    workers_per_machine: int
    num_standbys: int
    """Workers beyond those that hold ranks, on this machine."""
    secret: str = field(default="", repr=False)
    host: str = "127.0.0.1"
    port_range: str = ""
    faults: str = ""
    step_digests: str = ""
    max_steps: int = 0
    num_threads: int = 1
    hash_seed: int = 0
    script_digest: str = ""
    unit: Literal["worker", "machine"] = "worker"
    log_dir: Path | None = None
    grace_s: float = 20.0
    """From SIGTERM to the end of this machine."""
    labels: str = ""

    @property
    def socket(self) -> str:
        return str(self.directory / "agent.sock")

    def shared(self) -> dict[str, str]:
        """Variables of the warm process: the same in every worker that ever joins the job.

        The job's name is among them: an orphan is known by it.
        """
        threads = dict.fromkeys(THREAD_VARIABLES, str(self.num_threads))
        return {**threads, "PYTHONHASHSEED": str(self.hash_seed), "TRAINMOVER_JOB": self.job}

    def environment(self, worker: str, local_index: int) -> WorkerEnvironment:
        return WorkerEnvironment(
            job=self.job,
            run=self.run,
            worker=worker,
            machine=self.machine,
            local_index=local_index,
            layout=self.layout,
            script_digest=self.script_digest,
            unit=self.unit,
            bus=self.bus,
            agent=self.socket,
            directory=str(self.directory),
            secret=self.secret,
            host=self.host,
            port_range=self.port_range,
            faults=self.faults,
            step_digests=self.step_digests,
            max_steps=self.max_steps,
            grace_s=self.grace_s,
            labels=self.labels,
        )
