"""One line of an assignment: which worker holds a rank, and where it can be reached."""

from hashlib import sha256

from pydantic import BaseModel, ConfigDict, NonNegativeInt

from trainmover.schemas.names import Name


class Member(BaseModel):
    """`addresses` are `unix:/path` or `tcp:host:port`, in order of preference."""

    model_config = ConfigDict(frozen=True)

    rank: NonNegativeInt
    worker: Name
    machine: Name
    addresses: tuple[str, ...]


def digest(members: tuple[Member, ...]) -> str:
    """Short digest of an assignment: a runtime refuses another one for the same generation."""
    text = ";".join(f"{m.rank}={m.worker}@{','.join(m.addresses)}" for m in members)
    return sha256(text.encode()).hexdigest()[:16]
