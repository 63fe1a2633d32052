"""Resource limits for commands of the shell tool."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from clark_agent.errors import ConfigError

__all__ = ["CommandLimits"]


class CommandLimits(Struct, frozen=True, kw_only=True):
    """What a command may use; None lifts a limit. The defaults leave room for builds and tests.

    The kernel enforces these limits for each process, not for the command as a whole, which can
    have many processes. The supervisor counts the processes four times a second. In the sandbox the
    kernel limits them too, unless the host is root. The processor and the disk are not limited.

    Raises `ConfigError` for a limit that is not a number above 0.
    """

    memory: int | None = 8 << 30
    """Bytes of private writable memory per process (``RLIMIT_DATA``). Memory that it shares with
    other processes does not count. Address sanitizers reserve terabytes, and need None.
    """
    processes: int | None = 4_096
    """The maximum number of processes and threads at once."""
    open_files: int | None = 16_384
    """In each process."""
    file_size: int | None = 8 << 30
    """Bytes in each file."""
    scratch: int | None = 4 << 30
    """Bytes in each of ``/tmp``, ``/var/tmp``, ``/dev/shm`` and the home folder of the sandbox,
    which are kept in memory.
    """

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value: Any = getattr(self, name)
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < value < 1 << 63):
                raise ConfigError(
                    f"CommandLimits: {name} must be a whole number above 0 or None, not {value!r}"
                )

    @property
    def settings(self) -> str:
        """The limits in the format of the supervisor's arguments."""
        for_kernel = {"DATA": self.memory, "NOFILE": self.open_files, "FSIZE": self.file_size}
        kept = [f"{name}={value}" for name, value in for_kernel.items() if value is not None]
        return ",".join([str(self.processes or 0), *kept])
