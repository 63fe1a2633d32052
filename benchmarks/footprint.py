"""What an installation brings: prints the version of a package, and the size and number of all.

Runs in the framework's environment. Not counted: the installer, and in the size msgspec.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import distributions, version
from pathlib import Path

INSTALLER = {"pip", "setuptools", "wheel"}


def main(package: str) -> None:
    found = [d for d in distributions() if d.metadata["Name"].lower() not in INSTALLER]
    size = 0
    for distribution in found:
        if distribution.metadata["Name"] != "msgspec":
            paths = [Path(str(file.locate())) for file in distribution.files or ()]
            size += sum(path.stat().st_size for path in paths if path.is_file())
    print(json.dumps({"version": version(package), "bytes": size, "packages": len(found)}))


if __name__ == "__main__":
    main(sys.argv[1])
