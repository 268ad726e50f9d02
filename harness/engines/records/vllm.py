"""vLLM, in a process of its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from harness.config.engines import EngineSettings
from harness.config.settings import PlacementSettings, require, require_at_least
from harness.drafting.registry import method_of
from harness.engines.record import EngineRecord, Opening

if TYPE_CHECKING:
    from harness.config.run import RunSettings
    from harness.config.settings import DraftSettings
    from harness.drafting.method import Method
    from harness.engines.pair import SketchedPair
    from harness.engines.protocol import Engine

Backend = Literal["mp", "ray"]


@dataclass(frozen=True, kw_only=True)
class VllmSettings(EngineSettings):
    """Settings of `engine=vllm`.

    Attributes:
        tensor_parallel_size: GPUs that each layer is split over; with `vllm_server`
            `placement.gpus=` sets it too.
        pipeline_parallel_size: groups of such GPUs that the layers are divided among.
        distributed_executor_backend: `mp` for processes of one machine, `ray` for several machines;
            None lets vLLM choose.
    """

    name: str = "vllm"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    distributed_executor_backend: Backend | None = None

    def __post_init__(self) -> None:
        require_at_least(self, tensor_parallel_size=1, pipeline_parallel_size=1)


class Vllm(EngineRecord):
    """vLLM loads the weights itself; only the configurations are read before."""

    name = "vllm"
    summary = "vLLM, in a process of its own"
    settings = VllmSettings
    loads_weights = True
    may_queue = True
    may_crash = True
    starts_slowly = True
    takes_load = True
    has_synthetic_acceptance = True
    packages = ("vllm",)
    # vLLM's build for CPUs warns about NUMA from C++ whenever it starts, beyond the reach of
    # Python's filters: the level is all that can be chosen.
    environment: ClassVar[Mapping[str, str]] = {"TORCH_CPP_LOG_LEVEL": "ERROR"}

    def check(self, run: RunSettings) -> None:
        """Refuse what vLLM has nothing for, as far as the settings tell."""
        super().check(run)
        check_form(run)

    def check_draft(self, method: Method, draft: DraftSettings, settings: VllmSettings) -> None:
        method.check_vllm(draft)

    def check_pair(self, pair: SketchedPair, run: RunSettings) -> None:
        if pair.draft_plan is not None:
            # It refuses heads that vLLM does not draft with.
            method_of(pair.draft_plan.settings).vllm(pair.draft_plan, pair.draft_plan.settings)

    def check_installed(self) -> None:
        is_found = importlib.util.find_spec("vllm") is not None
        rule = "needs the vllm package: install it into an environment together with harness"
        require(is_found, "engine", rule, self.name)

    def open(self, opening: Opening) -> Engine:
        from harness.engines.vllm.engine import VllmEngine

        return VllmEngine(opening)


def check_form(run: RunSettings) -> None:
    """Raise a SettingError for models in a place or a form in which vLLM does not load them."""
    plain = PlacementSettings(reserve_gb=run.placement.reserve_gb)
    with_engine = f"with engine={run.engine.name}"
    rule = (
        f"must be auto {with_engine}: engine.tensor_parallel_size and"
        " engine.pipeline_parallel_size split a model"
    )
    require(run.placement == plain, "placement", rule, run.placement.strategy)
    for role, model in run.models.items():
        require(model.gguf_file is None, f"{role}.gguf_file", "needs engine=local", model.gguf_file)
        rule = f"must be none or 4bit {with_engine}: vLLM cannot quantize to 8 bits as it loads"
        require(model.quantization != "8bit", f"{role}.quantization", rule, model.quantization)


RECORD = Vllm()
