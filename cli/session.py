"""A file per live job on this machine, so that a second terminal finds it."""

import os
import shutil
import tempfile
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from trainmover.schemas.names import Name


class Session(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    url: str = Field(repr=False)
    """Of the bus, with its token."""
    secret: str = Field(repr=False)
    job: Name
    run: Name
    pid: PositiveInt
    """The process of `trainmover run`; the session is over when it is gone."""
    directory: str
    """Sockets and, with the embedded bus, its store; removed with the session."""


def folder() -> Path:
    """Made if it is missing, for this user only. Raises PermissionError if it is another's."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    parent = Path(base) if base else Path(tempfile.gettempdir()) / f"trainmover-{os.getuid()}"
    path = parent / "trainmover"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user: set XDG_RUNTIME_DIR to your own")
    path.chmod(0o700)
    return path


def write(session: Session) -> Path:
    """The file, 0600, complete from its first moment on."""
    path = folder() / f"{session.job}.json"
    fd, temporary = tempfile.mkstemp(dir=path.parent)  # made 0600
    with os.fdopen(fd, "w") as file:
        file.write(session.model_dump_json(indent=2))
    os.replace(temporary, path)
    return path


def live() -> dict[str, Session]:
    """Job -> session of every job that runs here; what a killed `run` left is removed."""
    found: dict[str, Session] = {}
    for path in sorted(folder().glob("*.json")):
        try:
            session = Session.model_validate_json(path.read_bytes())
        except (ValidationError, FileNotFoundError):
            continue
        if _runs(session.pid):
            found[session.job] = session
        else:
            remove(session)
    return found


def remove(session: Session) -> None:
    (folder() / f"{session.job}.json").unlink(missing_ok=True)
    shutil.rmtree(session.directory, ignore_errors=True)


def _runs(pid: int) -> bool:
    """Whether the pid is a live process that runs trainmover, not another that took the number."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"trainmover" in command
