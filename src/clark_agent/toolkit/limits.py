"""What a command of the shell tool may use up."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from clark_agent.errors import ConfigError

__all__ = ["CommandLimits"]


class CommandLimits(Struct, frozen=True, kw_only=True):
    """What a command may use up; None lifts a limit. The defaults leave room for builds and tests.

    The kernel holds these limits for each process, not for the command as a whole, which can have
    many processes. The number of processes is counted by the supervisor four times a second, and in
    the sandbox, unless the host is root, by the kernel too. None of this limits the processor or
    the disk.

    Raises `ConfigError` for a limit that is no number above 0.
    """

    memory: int | None = 8 << 30
    """Bytes of its own that a process may write to (``RLIMIT_DATA``); what it shares with others
    does not count. Address sanitizers reserve terabytes of them, and need None.
    """
    processes: int | None = 4_096
    """How many processes there may be at once, with their threads."""
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
        """For the supervisor."""
        for_kernel = {"DATA": self.memory, "NOFILE": self.open_files, "FSIZE": self.file_size}
        kept = [f"{name}={value}" for name, value in for_kernel.items() if value is not None]
        return ",".join([str(self.processes or 0), *kept])
