"""Counts what the interpreter does, in place of the seconds that it takes.

Needs nothing but modules that every interpreter has loaded, so that it can count an import.
"""

from __future__ import annotations

import gc
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, FrameType
    from typing import Any


class Operations:
    """Counts bytecodes, and calls of what is written in C, while it is on.

    The import system is left out: what it does depends on where files lie, and on whether they
    have been compiled before.
    """

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Operations:
        gc.collect()
        gc.disable()  # it would run finalizers at any time
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        gc.enable()

    if sys.version_info >= (3, 12):

        def _start(self) -> None:
            monitoring = sys.monitoring
            events = monitoring.events
            monitoring.use_tool_id(monitoring.PROFILER_ID, "operations")
            for event in (events.INSTRUCTION, events.C_RETURN, events.C_RAISE):
                monitoring.register_callback(monitoring.PROFILER_ID, event, self._happened)
            # Calls of Python functions are not counted, but without CALL those in C are not seen.
            monitoring.set_events(monitoring.PROFILER_ID, events.INSTRUCTION | events.CALL)

        def _stop(self) -> None:
            monitoring = sys.monitoring
            monitoring.set_events(monitoring.PROFILER_ID, monitoring.events.NO_EVENTS)
            monitoring.free_tool_id(monitoring.PROFILER_ID)

        def _happened(self, code: CodeType, *_: object) -> None:
            self.count += not _is_import_system(code)

    else:

        def _start(self) -> None:
            self._outer = sys.getprofile(), sys.gettrace()
            sys.setprofile(self._profile)
            sys.settrace(self._trace)

        def _stop(self) -> None:
            profile, trace = self._outer  # coverage goes on, where it is measured
            sys.settrace(trace)
            sys.setprofile(profile)

        def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
            if event == "call":
                if _is_import_system(frame.f_code):
                    return None
                frame.f_trace_opcodes = True
                frame.f_trace_lines = False
            else:
                self.count += event == "opcode"
            return self._trace

        def _profile(self, frame: FrameType, event: str, _: Any) -> None:
            self.count += event == "c_call" and not _is_import_system(frame.f_code)


def _is_import_system(code: CodeType) -> bool:
    return code.co_filename.startswith("<frozen importlib")
