"""What an agent and its warm process say to each other: one JSON object a datagram.

The channel is an inherited Unix socket pair (SOCK_SEQPACKET), so a message is never cut; the
pipes for a worker's output travel with its order (SCM_RIGHTS).
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from trainmover.schemas.names import Name

MAX_BYTES = 128 * 1024
"""Below the kernel's default socket buffer of 208 KiB."""


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True)


class Program(_Message):
    """What every worker runs."""

    script: str
    """Path of the script, or the module's name with `module`."""
    arguments: tuple[str, ...] = ()
    module: bool = False

    @property
    def argv(self) -> tuple[str, ...]:
        """As Python's own command line has it after the interpreter's options."""
        return (*(("-m",) if self.module else ()), self.script, *self.arguments)


class Start(_Message):
    """Fork a worker; its stdout and stderr come as two file descriptors beside the order."""

    kind: Literal["start"] = "start"
    worker: Name
    variables: dict[str, str]
    """Added to the environment that the warm process was started with."""


class Signal(_Message):
    """Send a signal to a worker, if it is still there."""

    kind: Literal["signal"] = "signal"
    worker: Name
    number: int


class Ready(_Message):
    """Imports are done, orders are served."""

    kind: Literal["ready"] = "ready"
    threads_from: str = ""
    """The import that left a second thread: workers are spawned, not forked. Empty: forked."""
    warm_s: float = 0.0


class Started(_Message):
    kind: Literal["started"] = "started"
    worker: Name
    pid: int


class Exited(_Message):
    kind: Literal["exited"] = "exited"
    worker: Name
    code: int
    """Exit code, or minus the number of the signal that ended it."""


ORDER: TypeAdapter[Start | Signal] = TypeAdapter(
    Annotated[Start | Signal, Field(discriminator="kind")]
)
REPORT: TypeAdapter[Ready | Started | Exited] = TypeAdapter(
    Annotated[Ready | Started | Exited, Field(discriminator="kind")]
)
