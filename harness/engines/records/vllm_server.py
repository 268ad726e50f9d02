"""vLLM's server, started for each arm."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.engines.record import Opening
from harness.engines.records.server import PresetServer, PresetSettings
from harness.engines.records.vllm import VllmSettings, check_form

if TYPE_CHECKING:
    from harness.config.run import RunSettings
    from harness.config.settings import DraftSettings
    from harness.drafting.method import Method

# Arguments of `engine=vllm` that a server does without, as its users run it.
_ONLY_IN_PROCESS = (
    "skip_tokenizer_init",
    "enable_prefix_caching",
    "disable_log_stats",
    "use_tqdm_on_load",
)
# Arguments that bound vLLM's memory; without them it takes nearly all of a GPU's.
_SIZES = ("kv_cache_memory_bytes", "gpu_memory_utilization")


@dataclass(frozen=True, kw_only=True)
class VllmServerSettings(PresetSettings, VllmSettings):
    """Settings of `engine=vllm_server`."""

    name: str = "vllm_server"

    def __post_init__(self) -> None:
        PresetSettings.__post_init__(self)
        VllmSettings.__post_init__(self)


class VllmServer(PresetServer):
    """Drafts as `engine=vllm` does."""

    name = "vllm_server"
    summary = "starts vLLM's server, with and without the draft"
    settings = VllmServerSettings
    program = ("vllm", "serve")
    has_synthetic_acceptance = True

    def adapted(self, run: RunSettings) -> RunSettings:
        """Split each layer over `placement.gpus`."""
        gpus = run.placement.gpus
        if gpus is None:
            return run
        placement = dataclasses.replace(run.placement, gpus=None)
        engine = dataclasses.replace(run.engine, tensor_parallel_size=gpus)  # type: ignore[call-arg]
        return dataclasses.replace(run, placement=placement, engine=engine)

    def check(self, run: RunSettings) -> None:
        super().check(run)
        check_form(run)

    def check_draft(self, method: Method, draft: DraftSettings, settings: Any) -> None:
        method.check_vllm(draft)

    def variables(self, opening: Opening, num_blocks: int) -> dict[str, str]:
        """On a CPU both servers would bind their threads to the same cores, and wait for each other: they bind none."""
        is_alone = bool(num_blocks) or opening.settings.draft is None
        return {} if opening.planned.gpus or is_alone else {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}

    def fit_together(self, opening: Opening) -> bool:
        from harness.engines.vllm.arguments import arm_arguments, fit_together

        arms = arm_arguments(opening)
        settings = opening.settings.engine
        assert isinstance(settings, VllmServerSettings)
        idle = [arms["speculative"]] if settings.has_idle else []
        return fit_together([*arms.values(), *idle], opening)

    def arguments(self, opening: Opening, num_blocks: int) -> dict[str, list[str]]:
        from harness.engines.vllm.arguments import arm_arguments, check

        check(opening)
        left_out = set(_ONLY_IN_PROCESS)
        if num_blocks and opening.planned.gpus:
            # Each arm has the GPUs for itself, as where it serves.
            left_out |= set(_SIZES)
        arms = {}
        arguments = {arm: started.arguments for arm, started in arm_arguments(opening).items()}
        if "speculative" in arguments:
            most = arguments["speculative"]["max_num_seqs"]
            nothing = {"num_speculative_tokens_per_batch_size": [[1, most, 0]]}
            config = arguments["speculative"]["speculative_config"] | nothing
            arguments["idle"] = arguments["speculative"] | {"speculative_config": config}
        for arm, started in arguments.items():
            model = str(started["model"])
            # The module ignores a model that stands first, and serves its default.
            is_module = any("api_server" in part for part in self._program(opening.settings.engine))
            flags = ["--model", model] if is_module else [model]
            flags += ["--host", "127.0.0.1", "--port", "{port}"]
            flags.append("--enable-prompt-tokens-details")
            for name, value in started.items():
                flag = f"--{name.replace('_', '-')}"
                if name in left_out or name == "model" or value in (None, False):
                    continue
                text = json.dumps(value) if isinstance(value, dict) else str(value)
                flags += [flag] if value is True else [flag, text]
            arms[arm] = flags
        return arms


RECORD = VllmServer()
