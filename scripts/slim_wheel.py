"""Leaves out of a wheel of bitsandbytes the libraries for versions of CUDA other than 13.0.

    python scripts/slim_wheel.py WHEEL

It has one library for each version of CUDA, and 3 MiB in place of 41 without them.
"""

from __future__ import annotations

import os
import re
import sys
import zipfile
from pathlib import Path

_LEFT_OUT = re.compile(r"bitsandbytes/libbitsandbytes_(?!cpu|cuda130\b).*")


def slim(wheel: Path) -> None:
    """Rewrite a wheel without these libraries, in its files and in its list of files."""
    smaller = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(smaller, "w") as new:
        for member in old.infolist():
            if _LEFT_OUT.match(member.filename):
                continue
            content = old.read(member)
            if member.filename.endswith(".dist-info/RECORD"):
                lines = content.decode().splitlines(keepends=True)
                content = "".join(line for line in lines if not _LEFT_OUT.match(line)).encode()
            new.writestr(member, content, zipfile.ZIP_DEFLATED)
    os.replace(smaller, wheel)


if __name__ == "__main__":
    slim(Path(sys.argv[1]))
