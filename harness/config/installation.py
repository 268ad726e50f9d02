"""Facts about this installation: where the package and its presets are, and which packages of the extra `local` are
missing. Also makes the command that installs an extra.
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

# The packages of the extra `local` that are needed to run any model on this machine.
_LOCAL = ("torch", "transformers", "accelerate", "safetensors")


def install_command(extras: str) -> str:
    """Return the command that adds extras, such as `ray,slurm`, to this installation, whether a checkout or a wheel.

    `WHEEL_FILE` stands for the wheel if it is not known where the wheel came from.
    """
    if (PACKAGE.parent / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{PACKAGE.parent}[{extras}]')}"
    try:
        # pip stores the origin of a wheel that did not come from an index in this file.
        text = importlib.metadata.distribution("specharness").read_text("direct_url.json")
        noted = json.loads(text or "{}")
        url = noted["url"]
    except (importlib.metadata.PackageNotFoundError, ValueError, KeyError):
        return f"pip install {shlex.quote(f'WHEEL_FILE[{extras}]')}"
    if url.startswith("file:"):
        return f"pip install {shlex.quote(f'{unquote(urlsplit(url).path)}[{extras}]')}"
    if "vcs_info" in noted:
        url = f"{noted['vcs_info']['vcs']}+{url}@{noted['vcs_info']['commit_id']}"
    return f"pip install {shlex.quote(f'specharness[{extras}] @ {url}')}"


def is_installed(package: str) -> bool:
    """Return whether Python finds a package, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


def missing_local() -> list[str]:
    """Return the missing packages among those needed to run a model on this machine; empty if `local` is installed."""
    return [package for package in _LOCAL if not is_installed(package)]


def require_local(setting: str, value: object = ..., instead: str = "") -> None:
    """Raise a SettingError if packages that models need are missing; its message has the command that installs them.

    Args:
        setting: the setting, or the command, that needs models on this machine.
        value: the setting's value; left out if there is none.
        instead: text about a way to do without models, added to the message.
    """
    missing = missing_local()
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        rule = f"needs {', '.join(missing)}, which {verb} not installed: {install_command('local')}"
        raise SettingError(setting, f"{rule}{instead}", value)
