"""One run by several processes, for models that are split over them: how many, and who starts and watches them."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from harness.config.commands import CompareSettings, RunSettings
from harness.config.errors import RunError, SettingError
from harness.results.environment import gpu_names
from harness.results.measurement import newest_run
from harness.sweep.worker import Job, Worker

# How many processes torchrun started, for the run and for the jobs of its sweep.
_ASKED = "HARNESS_RANKS"
_MACHINES = "HARNESS_RANK_MACHINES"

# What torchrun tells its processes. Ranks are told anew, and nothing else may take itself for one of torchrun's.
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")

SettingsType = TypeVar("SettingsType", bound=RunSettings)


def is_spare() -> bool:
    """Whether torchrun started this process beside the first one.

    Of torchrun's processes only the first runs anything, and starts as many ranks as torchrun was asked for: so whoever
    dies, one process is left that computes nothing, sees it, and writes it down. The first forgets torchrun here.
    """
    if os.environ["RANK"] != "0":
        return True
    os.environ[_ASKED], os.environ[_MACHINES] = os.environ["WORLD_SIZE"], os.environ["GROUP_WORLD_SIZE"]
    for name in [name for name in os.environ if name.startswith(_OF_TORCHRUN)]:
        del os.environ[name]
    return False


def settle(settings: SettingsType) -> SettingsType:
    """The settings with what torchrun adds to them, and what follows from ranks.

    Raises:
        SettingError: what ranks cannot do, or torchrun did not start as many as were asked for.
    """
    asked, strategy = os.environ.get(_ASKED), settings.placement.strategy
    if not settings.tensor_parallel:
        if asked is not None:
            rule = f"must be tensor_parallel under torchrun, which started {asked} processes"
            raise SettingError("placement.strategy", rule, strategy)
        return settings
    if isinstance(settings, CompareSettings) and settings.prompt is None:
        raise SettingError("prompt", "must be given beside tensor_parallel, whose processes have no common keyboard")
    placement = settings.placement
    if asked is not None:
        if os.environ[_MACHINES] != "1":
            raise SettingError("placement.strategy", "works on one machine (torchrun --nnodes 1)", strategy)
        if placement.gpus not in (None, int(asked)):
            rule = f"must be left out under torchrun, which started {asked} processes"
            raise SettingError("placement.gpus", rule, placement.gpus)
        placement = dataclasses.replace(placement, gpus=int(asked))
    # Nobody has tried to compile or capture what lies on several devices.
    return dataclasses.replace(settings, placement=placement, runner="eager")


def num_ranks(settings: RunSettings, variables: Mapping[str, str] | None = None) -> int:
    """How many processes the run wants: one a GPU, or as many as the settings say.

    One is the answer also where more are wanted than there are GPUs: planning then says so, once.

    Args:
        variables: environment variables that the processes will have besides.
    """
    if not settings.tensor_parallel:
        return 1
    model = settings.model if settings.strategies["model"] == "tensor_parallel" else settings.draft
    wanted = (model and model.gpus) or settings.placement.gpus
    chosen = (variables or {}).get("CUDA_VISIBLE_DEVICES")
    visible = len(gpu_names()) if chosen is None else len(chosen.split(","))
    return 1 if visible and wanted and wanted > visible else wanted or visible or 1


def run(experiment: str, settings: RunSettings, directory: Path, file: Path, count: int) -> None:
    """One run by `count` processes. Rank 0 alone prints and writes; if it cannot write its rows, this process does.

    Args:
        experiment: module with `run` and `record_failure`.
        file: in the directory, that gets the run's rows.

    Raises:
        HarnessError: what ended the run; RunError if a process died.
    """
    worker = Worker({}, count)
    try:
        death = worker.run(Job(experiment, settings, directory, logged=False))
    finally:
        worker.close()
    if worker.error is not None:
        raise worker.error
    if death is not None:
        if not newest_run(file):
            importlib.import_module(experiment).record_failure(settings, directory, death)
        raise RunError(death)
