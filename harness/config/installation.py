"""This installation: where the package and its presets are, which packages of the extra `local` it lacks, and how to
install them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shlex
from pathlib import Path
from urllib.parse import unquote, urlsplit

from harness.config.errors import SettingError

PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel, conf/ is inside the package; in a checkout, it is next to the package.
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"

# The packages of the extra `local` that every model on this machine needs.
_LOCAL = ("torch", "transformers", "accelerate", "safetensors")


def install_command(extras: str) -> str:
    """Return the command that adds extras, such as `ray,slurm`, to this installation, whether a checkout or a wheel."""
    if (PACKAGE.parent / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{PACKAGE.parent}[{extras}]')}"
    try:
        # pip notes the origin of a wheel that did not come from an index.
        noted = importlib.metadata.distribution("specharness").read_text("direct_url.json")
        wheel = unquote(urlsplit(json.loads(noted or "{}")["url"]).path)
    except (importlib.metadata.PackageNotFoundError, ValueError, KeyError):
        wheel = "WHEEL_FILE"
    return f"pip install {shlex.quote(f'{wheel}[{extras}]')}"


def is_installed(package: str) -> bool:
    """Return whether a package can be imported, as far as can be told without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


def missing_local() -> list[str]:
    """Return the packages that are missing to run a model on this machine; empty if `local` is installed."""
    return [package for package in _LOCAL if not is_installed(package)]


def require_local(setting: str, value: object = ..., instead: str = "") -> None:
    """Raise a SettingError with the command that helps, if models cannot run on this machine.

    Args:
        setting, value: the setting that needs models here.
        instead: text on how to do without them, added to the error.
    """
    missing = missing_local()
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        rule = f"needs {', '.join(missing)}, which {verb} not installed: {install_command('local')}"
        raise SettingError(setting, f"{rule}{instead}", value)
