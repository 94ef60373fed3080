"""What every event has in common: job, run, a type and an identity that a redelivery repeats."""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from trainmover.schemas.names import Name


class Event(BaseModel):
    """A fact, past tense. Unknown fields are ignored; within v1 only optional fields are added."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    TYPE: ClassVar[str]
    """`noun.verb`; with job and version it is the subject."""
    VERSION: ClassVar[int] = 1

    job: Name
    run: Name
    """One start of the job; message ids begin with it."""

    def key(self) -> str:
        """What tells this fact from others of its type within the run; the same when repeated."""
        raise NotImplementedError

    def identity(self) -> str:
        """CloudEvents id and `Nats-Msg-Id`."""
        return f"{self.run}/{self.TYPE}/{self.key()}"
