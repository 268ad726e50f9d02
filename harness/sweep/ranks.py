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

# Prefixes of variables that torchrun sets. Our ranks get other values, and libraries must not take
# a process for one of torchrun's.
_TORCHRUN_PREFIXES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")

SettingsType = TypeVar("SettingsType", bound=RunSettings)


def is_superfluous() -> bool:
    """Whether torchrun started this process, and it is not the first.

    The first one starts as many ranks as torchrun was asked for, and the others end at once. The
    first one computes nothing itself: it notices when a rank dies, and records it. Here it removes
    torchrun's variables.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    if os.environ["RANK"] != "0":
        return True
    os.environ[_STARTED] = os.environ["WORLD_SIZE"]
    os.environ[_MACHINES] = os.environ["GROUP_WORLD_SIZE"]
    for name in list(os.environ):
        if name.startswith(_TORCHRUN_PREFIXES):
            del os.environ[name]
    return False


def with_ranks(settings: SettingsType) -> SettingsType:
    """The settings with the number of processes that torchrun started.

    Raises:
        SettingError: ranks cannot do this, or torchrun started a different number than was asked
            for.
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
        rule = f"must be left out under torchrun, which started {started} processes"
        require(placement.gpus in (None, int(started)), "placement.gpus", rule, placement.gpus)
        placement = dataclasses.replace(placement, gpus=int(started))
    return dataclasses.replace(settings, placement=placement)


def num_ranks(settings: RunSettings, num_gpus: int = 0) -> int:
    """Number of processes that a run needs: one per GPU, or as many as the settings say.

    If that is more than there are GPUs the answer is 1, and planning reports it.

    Args:
        num_gpus: number of GPUs leased to the run; 0 for all.
    """
    if not settings.tensor_parallel:
        return 1
    split_model = settings.model if settings.strategy == "tensor_parallel" else settings.draft
    assert split_model is not None
    wanted = split_model.gpus or settings.placement.gpus
    visible = num_gpus or len(gpu_names())
    if wanted is None:
        return visible or 1
    return wanted if wanted <= visible or visible == 0 else 1
