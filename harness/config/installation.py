"""This installation: where the package and its presets are, and what it lacks of `specharness[local]`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from harness.config.errors import SettingError

PACKAGE = Path(__file__).resolve().parents[1]
# A wheel has conf/ inside the package, a checkout next to it.
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"

# What `specharness[local]` brings, and every use of a model here needs.
_LOCAL = ("torch", "transformers", "accelerate", "safetensors")
INSTALL_LOCAL = "pip install 'specharness[local]'"


def is_installed(package: str) -> bool:
    """Whether a package can be imported, as far as that is known without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


def missing_local() -> list[str]:
    """The packages without which no model runs on this machine; none where `specharness[local]` is installed."""
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
        rule = f"needs {', '.join(missing)}, which {verb} not installed: {INSTALL_LOCAL}"
        raise SettingError(setting, f"{rule}{instead}", value)
