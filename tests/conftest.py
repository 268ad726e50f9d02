"""Set-up for all tests."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from harness.config.machine import num_usable_cores
from harness.config.settings import ModelSettings

if TYPE_CHECKING:
    from in_process import Harness


# One thread for each process, because pytest runs more processes than there are cores. Before torch is imported, here
# and in what the tests start. The order of floating-point sums is then the same everywhere, too.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
# Nor does its compiler start processes, each of which would import torch first.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# pytest-xdist sets it in its processes, and tables would be as wide as that.
os.environ.pop("COLUMNS", None)
# Without bytecode every interpreter that a test starts would compile all of harness again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Without it the tokenizers warn in every process that is forked.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# The code of repositories that bring their own is copied to a directory of this process, which is
# removed at its end.
_modules = tempfile.TemporaryDirectory(prefix="harness-tests-")
os.environ["HF_MODULES_CACHE"] = _modules.name

# What the tests share is found by new interpreters, too.
_ROOT = Path(__file__).parents[1]
_PATHS = [_ROOT / "tests/support", _ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(map(str, _PATHS))
# One directory for all processes of pytest-xdist, which inherit it.
_shared = tempfile.TemporaryDirectory(prefix="harness-tests-")
if os.environ.setdefault("HARNESS_TESTS_SHARED", _shared.name) == _shared.name:
    # In the first process alone.
    from shipped_copies import ONE_LAYER, copy_shipped

    copy_shipped(ONE_LAYER, num_hidden_layers=1)

# Only a power failure could lose what is not written through, and each command would wait for the disk nine times.
os.fsync = lambda descriptor: None

# Our commands search for garbage before every timed answer. With all that libraries import, each search would take half
# a second: what exists when a test begins is exempted, and what a command exempts stays so.
gc.disable()
_unfreeze, gc.unfreeze = gc.unfreeze, lambda: None
_most_bytes = 0

# A shell makes what it starts in the background ignore Ctrl-C, and nohup a closed terminal, and so everything started
# from there: tests send both.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process more than there are cores: tests wait for what they have started, and all take a tenth less. With
    another one all take a tenth more.
    """
    return num_usable_cores() + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first, so that no process is left with them at the end; without a CUDA device skip those for one.

    Those with the fixture `gpus` are not skipped: it stands in for CUDA.
    """
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    marked = [item for item in gpu if "gpus" not in vars(item)["fixturenames"]]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_runtest_setup() -> None:
    """Exempt what exists from searches for garbage, or search once where it has become much."""
    global _most_bytes
    num_bytes = psutil.Process().memory_info().rss
    if num_bytes > _most_bytes:
        _unfreeze()
        gc.collect()
        gc.enable()
        _most_bytes = num_bytes + 1_500_000_000
    gc.freeze()


@pytest.fixture
def own_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Methods and rules in files of the test's directory: they and their modules are forgotten after it."""
    from harness.config.acceptance_rules import RULES
    from harness.config.installation import PACKAGE
    from harness.config.methods import METHODS

    monkeypatch.setenv("PYTHONPATH", str(PACKAGE.parent))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and tmp_path in Path(file).parents:
            del sys.modules[name]
    # Other directories stay: what was loaded from them is not loaded again, and workers look for it there.
    sys.path[:] = [path for path in sys.path if not Path(path).is_relative_to(tmp_path)]
    METHODS._loaded.clear()
    RULES._loaded.clear()


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Whatever a test draws without a seed of its own is the same, wherever and after whichever tests it runs."""
    random.seed(0)
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed(0)
    if "torch" in sys.modules:
        import torch

        torch.default_generator.manual_seed(0)


@pytest.fixture
def gpus() -> Iterator[Any]:
    """A GPU; where there is none, what `pretended_gpus` gives."""
    import torch

    from pretended_gpus import pretended_gpus

    if torch.cuda.is_available():
        yield None
    else:
        with pretended_gpus() as pretended:
            yield pretended


@pytest.fixture
def harness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Harness:
    """Runs commands in this process, in an empty directory. Workers of its sweeps are forked."""
    from forked import fork_worker
    from harness.cli import worker
    from in_process import Harness

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(worker, "start_process", fork_worker)
    # What a machine does after a lap matters to its times alone, which no test asserts.
    monkeypatch.setattr("harness.servers.engine._REST_S", 0.0)
    return Harness(monkeypatch, capsys)


@pytest.fixture
def save_model(tmp_path: Path) -> Callable[..., ModelSettings]:
    """A function that saves a random-weight model with its tokenizer and returns the settings that load it."""
    from tiny_checkpoints import save_random

    return partial(save_random, tmp_path)
