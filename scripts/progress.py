"""Run a command that takes a while, and show that time passes.

    python scripts/progress.py "installing the tools" pip install ...

In a terminal the seconds count up; elsewhere there is one line. The command's own output is left
alone, and its exit code is passed on.
"""

import subprocess
import sys
import time


def main() -> int:
    text, command = sys.argv[1], sys.argv[2:]
    began = time.monotonic()
    if not sys.stdout.isatty():
        print(f"{text} ...", flush=True)
        return subprocess.call(command)
    child = subprocess.Popen(command)
    try:
        while child.poll() is None:
            print(f"\r{text} ... {time.monotonic() - began:.0f} s", end="", flush=True)
            time.sleep(0.2)
    except KeyboardInterrupt:  # the command has had it too
        return child.wait() or 130
    print(f"\r{text}: {time.monotonic() - began:.0f} s   ", flush=True)
    return child.returncode


if __name__ == "__main__":
    sys.exit(main())
