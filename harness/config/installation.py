"""This installation: where the package and its presets are, what it lacks of the extra `local`, and what brings it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shlex
from pathlib import Path
from urllib.parse import unquote, urlsplit

from harness.config.errors import SettingError

PACKAGE = Path(__file__).resolve().parents[1]
# A wheel has conf/ inside the package, a checkout next to it.
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"

# What the extra `local` brings, and every use of a model here needs.
_LOCAL = ("torch", "transformers", "accelerate", "safetensors")


def install_command(extras: str) -> str:
    """The command that adds extras, `ray,slurm`, to this installation, of a checkout or of a wheel."""
    if (PACKAGE.parent / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{PACKAGE.parent}[{extras}]')}"
    try:
        # pip notes where a wheel came from that it did not find in an index.
        noted = importlib.metadata.distribution("specharness").read_text("direct_url.json")
        wheel = unquote(urlsplit(json.loads(noted or "{}")["url"]).path)
    except (importlib.metadata.PackageNotFoundError, ValueError, KeyError):
        wheel = "WHEEL_FILE"
    return f"pip install {shlex.quote(f'{wheel}[{extras}]')}"


def is_installed(package: str) -> bool:
    """Whether a package can be imported, as far as that is known without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


def missing_local() -> list[str]:
    """The packages without which no model runs on this machine; none where `local` is installed."""
    return [package for package in _LOCAL if not is_installed(package)]


def require_local(setting: str, value: object = ..., instead: str = "") -> None:
    """Raise a SettingError, with the command that helps, where models cannot run on this machine.

    Args:
        setting, value: what needs them.
        instead: what does without them.
    """
    missing = missing_local()
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        rule = f"needs {', '.join(missing)}, which {verb} not installed: {install_command('local')}"
        raise SettingError(setting, f"{rule}{instead}", value)
