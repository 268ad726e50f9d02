"""Packages that the base installation lacks: whether they are here, and how to get them."""

from __future__ import annotations

import importlib.util

from harness.config.errors import SettingError

# What `specharness[local]` brings, and every use of a model here needs.
_LOCAL = ("torch", "transformers", "accelerate", "safetensors")
INSTALL_LOCAL = "pip install 'specharness[local]'"


def is_installed(package: str) -> bool:
    """Whether a package can be imported, as far as that is known without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


def require_local(setting: str, value: object = ...) -> None:
    """Raise a SettingError, with the command that helps, where models cannot run on this machine.

    Args:
        setting, value: what needs them.
    """
    missing = [package for package in _LOCAL if not is_installed(package)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        rule = f"needs {', '.join(missing)}, which {verb} not installed: {INSTALL_LOCAL}"
        raise SettingError(setting, rule, value)
