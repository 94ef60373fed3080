"""What an agent tells a worker through its environment, read once at start."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from trainmover.schemas.names import Name

PREFIX = "TRAINMOVER_"


class WorkerEnvironment(BaseModel):
    """Each field is the variable TRAINMOVER_<NAME>."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: Name
    run: Name
    worker: Name
    machine: Name
    local_index: NonNegativeInt
    layout: str
    """As `Layout.parse` reads it."""
    script_digest: str = ""
    """As in `job.submitted`: what a tape that was recorded for another one is known by."""
    unit: Literal["worker", "machine"] = "worker"
    bus: str
    """URL of the NATS server."""
    agent: str
    """Path of the agent's Unix socket."""
    directory: str
    """Folder for this job's sockets on this machine; short, since a socket path has 107 bytes."""
    secret: str = ""
    """Hex; empty: peers and commands are not authenticated."""
    host: str = "127.0.0.1"
    """Interface address that links listen on and advertise."""
    port_range: str = ""
    """`first-last`; empty: any free port."""
    faults: str = ""
    """`;`-separated fault specifications of `trainmover run --fault`."""
    step_digests: str = ""
    """Folder in which each rank writes a digest after every committed step; empty: none."""
    max_steps: NonNegativeInt = 0
    """`ctx.steps` makes no more updates than this, whatever the script asks for; 0: no bound."""
    beat_s: Annotated[float, Field(gt=0)] = 0.5
    grace_s: Annotated[float, Field(gt=0)] = 20.0
    """From SIGTERM to its end, as far as whoever sends it is concerned."""
    labels: str = ""
    """`key=value` of the machine, separated by commas."""

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Self | None:
        """None when the process is no worker of a job; ValueError names what is wrong."""
        if PREFIX + "WORKER" not in environ:
            return None
        found = {
            name: environ[PREFIX + name.upper()]
            for name in cls.model_fields
            if PREFIX + name.upper() in environ
        }
        try:
            return cls.model_validate(found)
        except ValidationError as error:
            where = ", ".join(PREFIX + str(e["loc"][0]).upper() for e in error.errors())
            raise ValueError(
                f"the environment of a worker is set by its agent; wrong or missing: {where}"
            ) from error

    def variables(self) -> dict[str, str]:
        return {PREFIX + k.upper(): str(v) for k, v in self.model_dump().items()}
