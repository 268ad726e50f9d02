"""What each command is asked to do: the settings all share, and each one's own. As in `settings`, none can be wrong."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.config.errors import nearest
from harness.config.settings import (
    DecodingSettings,
    Dtype,
    ModelSettings,
    PlacementSettings,
    PromptSettings,
    ResultSettings,
    Strategy,
    require,
)

Weights = Literal["stored", "random"]
RunnerName = Literal["auto", "eager", "static", "compiled", "graphs", "graphs_only"]
ChatTemplate = Literal["auto", "always", "never"]
View = Literal["text", "race", "log"]
Fault = Literal[
    "none",
    "residual_warped_twice",
    "bonus_from_wrong_position",
    "rollback_off_by_one",
    "draft_probabilities_ignored",
    "lenience",
]

# Where `eval` finds its tasks: a new one is a new file and nothing else.
_TASKS = Path(__file__).resolve().parents[1] / "experiments" / "tasks"


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What every command that decodes shares.

    Attributes:
        resume: in a sweep, take over what was measured before under the same circumstances.
        job_timeout_s: a sweep ends a job that takes longer; None lets it run.
        gpus_per_job: GPUs that a job of a sweep has for itself, where several run side by side; None deals none out.
        force: load the pair even where it does not fit by the plan.
        weights: `random` builds the models from their configurations alone, without a download, to measure times.
        runner: what runs the models. `eager` as they are; `static` on a cache of fixed size; `compiled` by torch on
            such a cache; `graphs` compiled and captured as CUDA graphs, `graphs_only` captured alone. `auto` is
            `graphs` on CUDA and `eager` elsewhere.
    """

    model: ModelSettings
    draft: ModelSettings | None
    decoding: DecodingSettings
    placement: PlacementSettings
    results: ResultSettings
    dtype: Dtype = "auto"
    seed: int = 0
    batch_size: int = 1
    chat_template: ChatTemplate = "auto"
    resume: bool = True
    job_timeout_s: float | None = None
    gpus_per_job: int | None = None
    force: bool = False
    weights: Weights = "stored"
    runner: RunnerName = "auto"

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, "batch_size", "must be at least 1", self.batch_size)
        require(self.seed >= 0, "seed", "must not be negative", self.seed)
        timeout, gpus = self.job_timeout_s, self.gpus_per_job
        require(timeout is None or timeout > 0, "job_timeout_s", "must be positive", timeout)
        require(gpus is None or gpus >= 1, "gpus_per_job", "must be at least 1", gpus)
        if self.tensor_parallel:
            self._check_ranks()

    @property
    def pair(self) -> tuple[object, ...]:
        """What decides which weights are loaded, and where: runs that agree in it can share a loaded pair."""
        return self.model, self.draft, self.placement, self.dtype, self.weights, self.force

    def row_tokens(self, prompt_length: int, max_new_tokens: int) -> int:
        """Tokens of a row: its prompt, what is generated, and what is drafted beyond it."""
        return prompt_length + max_new_tokens + (0 if self.draft is None else self.decoding.num_draft_tokens)

    @property
    def strategies(self) -> dict[str, Strategy]:
        """How each model is placed, by its role."""
        models = {"model": self.model, "draft": self.draft}
        return {role: self.placement.strategy_for(role, model) for role, model in models.items() if model is not None}

    @property
    def tensor_parallel(self) -> bool:
        """Whether a model is split over several processes."""
        return "tensor_parallel" in self.strategies.values()

    def _check_ranks(self) -> None:
        beside = "cannot be combined with tensor_parallel"
        offload, device_map = self.placement.offload, self.placement.device_map
        require(offload == "none", "placement.offload", beside, offload)
        require(device_map is None, "placement.device_map", f"{beside}, which needs none", device_map)
        require(self.runner in ("auto", "eager"), "runner", f"{beside}, which runs with runner=eager", self.runner)
        for role, model in (("model", self.model), ("draft", self.draft)):
            if model is None or self.strategies[role] != "tensor_parallel":
                continue
            plain = f"{beside}, which splits plain weights only"
            require(model.quantization == "none", f"{role}.quantization", plain, model.quantization)
            require(model.gguf_file is None, f"{role}.gguf_file", plain, model.gguf_file)
        for role, strategy in self.strategies.items():
            rule = f"{beside}: beside it a model is whole on each rank (single, cpu) or split as well (tensor_parallel)"
            require(strategy in ("single", "cpu", "tensor_parallel"), f"{role}.placement", rule, strategy)


@dataclass(frozen=True, kw_only=True)
class PromptedSettings(RunSettings):
    """What every command that decodes a prompt set shares."""

    prompts: PromptSettings


@dataclass(frozen=True, kw_only=True)
class LatencySettings(PromptedSettings):
    """`latency`: regular against speculative decoding on the same prompts.

    Attributes:
        num_prompts: how many of the prompt set are measured.
        num_warmup: batches that run through every arm first and are thrown away.
        num_resamples: of the paired bootstrap.
        test: two short prompts, to see that a pair works at all; the row says so.
        profile: also write a trace of a few iterations of each arm, after everything was measured.
    """

    num_prompts: int = 15
    num_warmup: int = 1
    num_resamples: int = 10_000
    test: bool = False
    profile: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.num_prompts >= 1, "num_prompts", "must be at least 1", self.num_prompts)
        require(self.num_warmup >= 0, "num_warmup", "must not be negative", self.num_warmup)
        require(self.num_resamples >= 100, "num_resamples", "must be at least 100", self.num_resamples)


@dataclass(frozen=True, kw_only=True)
class CompareSettings(PromptedSettings):
    """`compare`: both decoders on prompts that are typed.

    Attributes:
        view: `text` streams one arm after the other; `race` measures both and replays them side by side; `log` also
            lists every rejection.
        prompt: the only one, then the command ends; None asks for prompts, on the terminal or a line each from a pipe.
        json: one JSON record a prompt on stdout, and nothing else there.
        prompts: examples that the session offers in its history.
    """

    view: View = "text"
    prompt: str | None = None
    json: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.batch_size == 1, "batch_size", "must be 1: compare decodes one prompt at a time", self.batch_size)
        if self.prompt is not None:
            require(bool(self.prompt.strip()), "prompt", "must hold text", self.prompt)
            require(_is_text(self.prompt), "prompt", "must be UTF-8 text", repr(self.prompt))


def _is_text(value: str) -> bool:
    """Whether it has no stray bytes or half characters, which a command line may hold and no tokenizer takes."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


@dataclass(frozen=True, kw_only=True)
class EvalSettings(RunSettings):
    """`eval`: right answers of both arms to the same questions.

    Attributes:
        task: a module in `experiments/tasks`.
        operands: lowest and highest; both operands of a question lie between them.
        seeds: of the questions and of sampling; each draws questions of its own.
        num_prompts: questions a seed.
        resume: also take over the answers that an earlier run with the same settings gave.
    """

    task: str = "multiplication"
    operands: tuple[int, ...] = (1, 99)
    seeds: tuple[int, ...] = (0,)
    num_prompts: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        tasks = sorted(file.stem for file in _TASKS.glob("[!_]*.py"))
        require(self.task in tasks, "task", f"must be one of {', '.join(tasks)}{nearest(self.task, tasks)}", self.task)
        operands, seeds = list(self.operands), list(self.seeds)
        rule = "must be the lowest and the highest operand, such as [1,99], from 0 to 10^9"
        require(len(operands) == 2 and 0 <= operands[0] <= operands[-1] <= 10**9, "operands", rule, operands)
        require(bool(seeds), "seeds", "must name at least one seed", seeds)
        require(min(seeds) >= 0, "seeds", "must not be negative", seeds)
        require(len(set(seeds)) == len(seeds), "seeds", "must not name a seed twice", seeds)
        require(self.weights == "stored", "weights", "must be stored: random weights know no answers", self.weights)
        bias = self.decoding.synthetic_acceptance
        rule = "must be null: answers of which a coin accepts the tokens say nothing"
        require(bias is None, "decoding.synthetic_acceptance", rule, bias)
        require(self.num_prompts >= 1, "num_prompts", "must be at least 1", self.num_prompts)

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms that answer."""
        return ("regular",) if self.draft is None else ("regular", "speculative")


@dataclass(frozen=True, kw_only=True)
class RecoverySettings(PromptedSettings):
    """`recovery`: does speculative decoding recover the target's own distribution?

    Attributes:
        num_prompts: of the greedy comparison; of these, the sampled tests take the few that tell most.
        num_draws: sampled continuations, over all tests.
        false_alarm_rate: chance that the sampled tests of one run call a lossless pair lossy.
        shift: of a token's distribution, in total variation, that must not go unseen; the power is stated against it.
        fault: a mistake planted on purpose, which the same tests must catch.
        batch_size: rows that are generated at once.
    """

    num_prompts: int = 15
    num_draws: int = 60_000
    false_alarm_rate: float = 1e-9
    shift: float = 0.05
    fault: Fault = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.draft is not None, "draft", "must be a model: without a draft nothing can be lost", "none")
        require(self.num_prompts >= 1, "num_prompts", "must be at least 1", self.num_prompts)
        require(self.num_draws >= 1000, "num_draws", "must be at least 1000", self.num_draws)
        require(0 < self.false_alarm_rate < 1, "false_alarm_rate", "must lie in (0, 1)", self.false_alarm_rate)
        require(0 < self.shift <= 0.5, "shift", "must lie in (0, 0.5]", self.shift)
        greedy, decoding = self.decoding.temperature == 0, self.decoding
        rule = "must be none where decoding.synthetic_acceptance stands in for the rule"
        require(self.fault == "none" or decoding.synthetic_acceptance is None, "fault", rule, self.fault)
        everywhere = self.fault in ("none", "bonus_from_wrong_position", "rollback_off_by_one")
        require(everywhere or not greedy, "fault", "changes nothing at decoding.temperature=0", self.fault)
        plain = decoding.temperature == 1 and decoding.top_k == 0 and decoding.top_p == 1
        require(
            not (plain and self.fault == "residual_warped_twice"),
            "fault",
            "changes nothing at decoding.temperature=1 without top_k or top_p",
            self.fault,
        )


@dataclass(frozen=True, kw_only=True)
class PlanSettings(RunSettings):
    """`plan`: does a pair fit, before anything is downloaded? Nothing is decoded: `prompts`, `seed` and the like, and
    `force`, change nothing, so that the settings of another command can be planned as they are.

    Attributes:
        gpus: how many GPUs to pretend.
        gpu_memory: of each, with its unit: `40GB` (10^9 bytes), `80GiB` (2^30 bytes).
        bandwidth: of a GPU's memory, or of main memory, in GB/s.
        prompt_length: tokens of the longest prompt.
    """

    gpus: int | None = None
    gpu_memory: str | None = None
    bandwidth: float | None = None
    prompt_length: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.gpus is None or self.gpus >= 1, "gpus", "must be at least 1", self.gpus)
        if self.gpu_memory is not None:
            is_number = re.fullmatch(r"\d+(\.\d*)?", self.gpu_memory)
            hint = f" (did you mean {self.gpu_memory}GB?)" if is_number else ""
            rule = f"must be an amount with its unit, such as 40GB or 80GiB{hint}"
            require(bool(self.gpu_memory_bytes), "gpu_memory", rule, self.gpu_memory)
        finite = self.bandwidth is None or 0 < self.bandwidth < float("inf")
        require(finite, "bandwidth", "must be positive, in GB/s", self.bandwidth)
        require(self.prompt_length >= 1, "prompt_length", "must be at least 1", self.prompt_length)

    @property
    def gpu_memory_bytes(self) -> int | None:
        """`gpu_memory` in bytes; None where it is not set or is no amount."""
        units = {"m": 2, "g": 3, "t": 4}
        found = re.fullmatch(r"(\d+(?:\.\d*)?) ?([mgt])(i?)b?", self.gpu_memory or "", re.IGNORECASE)
        return found and round(float(found[1]) * (1024 if found[3] else 1000) ** units[found[2].lower()])
