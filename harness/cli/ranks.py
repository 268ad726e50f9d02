"""Number of processes over which a model is split, with torchrun and without."""

from __future__ import annotations

import dataclasses
import os
from typing import TypeVar

from harness.config.machine import gpu_names
from harness.config.run import RunSettings
from harness.config.settings import require

# Numbers of processes that torchrun started, and of machines.
_STARTED = "HARNESS_RANKS"
_MACHINES = "HARNESS_RANK_MACHINES"

# Variables that torchrun sets, beside those that begin with TORCHELASTIC_. Our ranks get other
# values, and libraries must not take a process for one of torchrun's.
_OF_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)

SettingsType = TypeVar("SettingsType", bound=RunSettings)


def take_over_from_torchrun() -> bool:
    """Let the first of torchrun's processes start the ranks in place of torchrun.

    It computes nothing itself: it starts as many ranks as torchrun was asked for, notices when one
    dies, and records it. Here it notes their number, and removes torchrun's variables.

    Returns:
        Whether this process must end, because it is another of torchrun's processes.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    if os.environ["RANK"] != "0":
        return True
    os.environ[_STARTED] = os.environ["WORLD_SIZE"]
    os.environ[_MACHINES] = os.environ["GROUP_WORLD_SIZE"]
    for name in list(os.environ):
        if name in _OF_TORCHRUN or name.startswith("TORCHELASTIC_"):
            del os.environ[name]
    return False


def with_ranks(settings: SettingsType) -> SettingsType:
    """The settings with the number of processes that torchrun started.

    Raises:
        SettingError: the placement is not tensor_parallel, or torchrun started processes on several
            machines, or a different number than was asked for.
    """
    started = os.environ.get(_STARTED)
    placement = settings.placement
    if not settings.tensor_parallel:
        rule = f"must be tensor_parallel under torchrun, which started {started} processes"
        require(started is None, "placement.strategy", rule, placement.strategy)
        return settings
    if started is not None:
        rule = "works on one machine (torchrun --nnodes 1)"
        require(os.environ[_MACHINES] == "1", "placement.strategy", rule, placement.strategy)
        setting, asked = _asked_number(settings)
        rule = f"must be left out under torchrun, which started {started} processes"
        require(asked in (None, int(started)), setting, rule, asked)
        placement = dataclasses.replace(placement, gpus=int(started))
    return dataclasses.replace(settings, placement=placement)


def num_ranks(settings: RunSettings, num_gpus: int = 0) -> int:
    """Number of processes that a run needs: one per GPU, or as many as the settings say.

    If that is more than there are GPUs the answer is 1: one process plans it and reports the misfit,
    instead of all of them.

    Args:
        num_gpus: number of GPUs leased to the run; 0 for all.
    """
    if not settings.tensor_parallel:
        return 1
    _, wanted = _asked_number(settings)
    visible = num_gpus or len(gpu_names())
    if wanted is None:
        return visible or 1
    return wanted if wanted <= visible or visible == 0 else 1


def _asked_number(settings: RunSettings) -> tuple[str, int | None]:
    """The setting with the number of processes that the split model is for, as typed, and its value."""
    role = "model" if settings.strategy == "tensor_parallel" else "draft"
    own_number = settings.models[role].gpus
    if own_number is not None:
        return f"{role}.gpus", own_number
    return "placement.gpus", settings.placement.gpus
