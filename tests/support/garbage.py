"""Searches for garbage that pass over what libraries have imported: with it each of them takes half a second.

Our commands search before every timed answer. What exists when a test begins is exempted from that, and what a command
exempts stays so; when the process has grown by much, everything is searched once.
"""

from __future__ import annotations

import gc

import psutil

# Bytes by which the process may grow before everything is searched.
_MOST_GROWTH = 1_500_000_000

_process = psutil.Process()
_size = 0
_unfreeze = gc.unfreeze


def leave_imports() -> None:
    """Do not search until `exempt_imports`: imports make millions of objects, and hardly any garbage."""
    gc.disable()


def exempt_imports() -> None:
    """Exempt everything that exists, after a search, and search from now on.

    Blocks of `quick_garbage_collections` then leave it exempted.
    """
    global _size
    _unfreeze()
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None
    gc.enable()
    _size = _process.memory_info().rss


def exempt_what_is_left() -> None:
    """Exempt what earlier tests have left, or free it where that has become much."""
    if _process.memory_info().rss > _size + _MOST_GROWTH:
        exempt_imports()
    gc.freeze()
