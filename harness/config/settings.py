"""What a run is asked to do: frozen dataclasses that cannot hold a wrong value.

`conversion.py` turns a composed configuration into these; everything past this room takes them. Each class checks
itself in `__post_init__` and says setting, rule and value when a rule is broken; the conversion adds where in the tree
the setting stands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness.config.errors import SettingError, nearest

Quantization = Literal["none", "8bit", "4bit"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Strategy = Literal["balanced", "auto", "sequential", "single", "cpu", "tensor_parallel"]
Rule = Literal["deepmind", "google"]
Weights = Literal["stored", "random"]
RunnerName = Literal["auto", "eager", "static", "compiled", "graphs", "graphs_only"]
ChatTemplate = Literal["auto", "always", "never"]
Fault = Literal[
    "none",
    "residual_warped_twice",
    "bonus_from_wrong_position",
    "rollback_off_by_one",
    "draft_probabilities_ignored",
    "lenience",
]
View = Literal["text", "race", "log"]

# Where `eval` finds its tasks: a new one is a new file and nothing else.
_TASKS = Path(__file__).resolve().parents[1] / "experiments" / "tasks"


def _require(holds: bool, setting: str, rule: str, value: object) -> None:
    if not holds:
        raise SettingError(setting, rule, value)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """One model: where its weights are, and how they are held.

    Attributes:
        name: as typed on the command line, `7B_8bit`.
        repository: a hub repository or a directory; the tokenizer lies there too unless `tokenizer` says otherwise.
        architecture: keyword arguments of the transformers configuration, `model_type` among them, so that planning
            and random weights need no network. None for models named by path.
        dtype: of the weights that are not quantized; None takes the run's.
        placement: strategy of this model alone; None takes the run's.
        gpus: how many GPUs this model may use; None takes the placement's.
        gguf_file: file name inside `repository` when the weights are GGUF.
    """

    name: str
    repository: str
    revision: str | None = None
    architecture: Mapping[str, Any] | None = None
    quantization: Quantization = "none"
    dtype: Dtype | None = None
    placement: Strategy | None = None
    gpus: int | None = None
    gguf_file: str | None = None
    tokenizer: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        _require(self.gpus is None or self.gpus >= 1, "gpus", "must be at least 1", self.gpus)
        _require(bool(self.repository), "repository", "must name a repository or a directory", "")


@dataclass(frozen=True, kw_only=True)
class PlacementSettings:
    """On which devices the layers lie.

    Attributes:
        strategy: `balanced`, `auto` and `sequential` are accelerate's; `single` is one GPU; `cpu` uses none. On a
            machine without a GPU every strategy means the CPU. `tensor_parallel` splits every layer of the target over
            all GPUs, a process each, and copies the draft to each; `draft.placement=tensor_parallel` splits that too.
        gpus: how many GPUs may be used, from the first visible one on; None for all. For `tensor_parallel`
            also how many processes share a CPU.
        reserve_gb: left free on each GPU for activations and the KV cache, in GB (10^9 bytes).
        offload: where layers that fit on no GPU may go; they go nowhere unless asked.
        device_map: an explicit map from module names to devices; overrides the strategy, target only.
    """

    strategy: Strategy = "balanced"
    gpus: int | None = None
    reserve_gb: float = 2.0
    offload: Literal["none", "cpu", "disk"] = "none"
    device_map: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _require(self.gpus is None or self.gpus >= 1, "gpus", "must be at least 1", self.gpus)
        _require(self.reserve_gb >= 0, "reserve_gb", "must not be negative", self.reserve_gb)

    def strategy_for(self, role: str, model: ModelSettings) -> Strategy:
        """The model's own strategy, else the run's; only a draft that says so itself is split over ranks."""
        copied = role == "draft" and self.strategy == "tensor_parallel"
        return model.placement or ("single" if copied else self.strategy)


@dataclass(frozen=True, kw_only=True)
class DecodingSettings:
    """How tokens are chosen and verified.

    Attributes:
        num_draft_tokens: K, proposed tokens an iteration.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose mass reaches this; 1 keeps all.
        rule: whose acceptance rule; they differ in `lenience` alone.
        lenience: Leviathan's l in (0, 1]: accept with min(1, p / (l q)). Below 1 the output is no longer the target's.
        synthetic_acceptance: accept each draft token by a coin of this bias in [0, 1] instead of by the rule, to ask
            what a pair would give if its draft agreed that often; None for the rule.
        ignore_eos: go on past end-of-sequence so that every arm generates the same number of tokens.
    """

    num_draft_tokens: int = 4
    temperature: float = 0.5
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 64
    rule: Rule = "deepmind"
    lenience: float = 1.0
    synthetic_acceptance: float | None = None
    ignore_eos: bool = True

    def __post_init__(self) -> None:
        k = self.num_draft_tokens
        _require(k >= 1, "num_draft_tokens", "must be at least 1 (draft=none measures without a draft)", k)
        _require(self.temperature >= 0, "temperature", "must not be negative (0 is greedy)", self.temperature)
        _require(self.top_k >= 0, "top_k", "must not be negative (0 keeps all)", self.top_k)
        _require(0 < self.top_p <= 1, "top_p", "must lie in (0, 1]", self.top_p)
        _require(self.max_new_tokens >= 1, "max_new_tokens", "must be at least 1", self.max_new_tokens)
        _require(0 < self.lenience <= 1, "lenience", "must lie in (0, 1]", self.lenience)
        _require(
            self.lenience == 1 or self.rule == "google",
            "lenience",
            "below 1 needs decoding.rule=google; DeepMind's rule has no lenience",
            self.lenience,
        )
        bias = self.synthetic_acceptance
        _require(bias is None or 0 <= bias <= 1, "synthetic_acceptance", "must lie in [0, 1]", bias)
        rule = "replaces the rule, and leaves lenience nothing to act on"
        _require(bias is None or self.lenience == 1, "synthetic_acceptance", rule, bias)

    @property
    def lossy(self) -> bool:
        """Whether the output may differ in distribution from the target's own."""
        return self.lenience < 1 or self.synthetic_acceptance is not None


@dataclass(frozen=True, kw_only=True)
class PromptSettings:
    """A prompt set: a `.txt` file with one prompt a line, or a `.jsonl` file with `prompt`, `turns` or `messages`."""

    name: str
    file: str

    def __post_init__(self) -> None:
        known = self.file.endswith((".txt", ".jsonl"))
        _require(known, "file", "must be a preset, a .txt or a .jsonl file", self.file)


@dataclass(frozen=True, kw_only=True)
class ResultSettings:
    """Where rows go. `file` collects the arm rows of every run, relative to the working directory."""

    file: str


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
        _require(self.batch_size >= 1, "batch_size", "must be at least 1", self.batch_size)
        _require(self.seed >= 0, "seed", "must not be negative", self.seed)
        timeout, gpus = self.job_timeout_s, self.gpus_per_job
        _require(timeout is None or timeout > 0, "job_timeout_s", "must be positive", timeout)
        _require(gpus is None or gpus >= 1, "gpus_per_job", "must be at least 1", gpus)
        if self.tensor_parallel:
            self._check_ranks()

    @property
    def pair(self) -> tuple[object, ...]:
        """What decides which weights are loaded, and where: runs that agree in it can share a loaded pair."""
        return self.model, self.draft, self.placement, self.dtype, self.weights, self.force

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
        _require(offload == "none", "placement.offload", beside, offload)
        _require(device_map is None, "placement.device_map", f"{beside}, which needs none", device_map)
        _require(self.runner in ("auto", "eager"), "runner", f"{beside}, which runs with runner=eager", self.runner)
        for role, model in (("model", self.model), ("draft", self.draft)):
            if model is None or self.strategies[role] != "tensor_parallel":
                continue
            plain = f"{beside}, which splits plain weights only"
            _require(model.quantization == "none", f"{role}.quantization", plain, model.quantization)
            _require(model.gguf_file is None, f"{role}.gguf_file", plain, model.gguf_file)
        for role, strategy in self.strategies.items():
            rule = f"{beside}: beside it a model is whole on each rank (single, cpu) or split as well (tensor_parallel)"
            _require(strategy in ("single", "cpu", "tensor_parallel"), f"{role}.placement", rule, strategy)


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
        _require(self.num_prompts >= 1, "num_prompts", "must be at least 1", self.num_prompts)
        _require(self.num_warmup >= 0, "num_warmup", "must not be negative", self.num_warmup)
        _require(self.num_resamples >= 100, "num_resamples", "must be at least 100", self.num_resamples)


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
        _require(self.batch_size == 1, "batch_size", "must be 1: compare decodes one prompt at a time", self.batch_size)
        if self.prompt is not None:
            _require(bool(self.prompt.strip()), "prompt", "must hold text", self.prompt)
            _require(_is_text(self.prompt), "prompt", "must be UTF-8 text", repr(self.prompt))


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
        _require(self.task in tasks, "task", f"must be one of {', '.join(tasks)}{nearest(self.task, tasks)}", self.task)
        operands, seeds = list(self.operands), list(self.seeds)
        rule = "must be the lowest and the highest operand, such as [1,99], from 0 to 10^9"
        _require(len(operands) == 2 and 0 <= operands[0] <= operands[-1] <= 10**9, "operands", rule, operands)
        _require(bool(seeds), "seeds", "must name at least one seed", seeds)
        _require(min(seeds) >= 0, "seeds", "must not be negative", seeds)
        _require(len(set(seeds)) == len(seeds), "seeds", "must not name a seed twice", seeds)
        _require(self.weights == "stored", "weights", "must be stored: random weights know no answers", self.weights)
        bias = self.decoding.synthetic_acceptance
        rule = "must be null: answers of which a coin accepts the tokens say nothing"
        _require(bias is None, "decoding.synthetic_acceptance", rule, bias)
        _require(self.num_prompts >= 1, "num_prompts", "must be at least 1", self.num_prompts)

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms that answer."""
        return ("regular",) if self.draft is None else ("regular", "speculative")


@dataclass(frozen=True, kw_only=True)
class RecoverySettings(PromptedSettings):
    """`recovery`: does speculative decoding recover the target's own distribution?

    Attributes:
        num_prompts: of the greedy comparison, and of the sampled tests.
        num_draws: sampled continuations, over all prompts.
        false_alarm_rate: chance that the sampled tests of one run call a lossless pair lossy.
        shift: of a token's distribution, in total variation, that must not go unseen; the power is stated against it.
        fault: a mistake planted on purpose, which the same tests must catch.
        batch_size: rows that are generated at once.
    """

    num_prompts: int = 15
    num_draws: int = 100_000
    false_alarm_rate: float = 1e-9
    shift: float = 0.05
    fault: Fault = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.draft is not None, "draft", "must be a model: without a draft nothing can be lost", "none")
        _require(self.num_prompts >= 1, "num_prompts", "must be at least 1", self.num_prompts)
        _require(self.num_draws >= 1000, "num_draws", "must be at least 1000", self.num_draws)
        _require(0 < self.false_alarm_rate < 1, "false_alarm_rate", "must lie in (0, 1)", self.false_alarm_rate)
        _require(0 < self.shift <= 0.5, "shift", "must lie in (0, 0.5]", self.shift)
        greedy, decoding = self.decoding.temperature == 0, self.decoding
        rule = "must be none where decoding.synthetic_acceptance stands in for the rule"
        _require(self.fault == "none" or decoding.synthetic_acceptance is None, "fault", rule, self.fault)
        everywhere = self.fault in ("none", "bonus_from_wrong_position", "rollback_off_by_one")
        _require(everywhere or not greedy, "fault", "changes nothing at decoding.temperature=0", self.fault)
        plain = decoding.temperature == 1 and decoding.top_k == 0 and decoding.top_p == 1
        _require(
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
        _require(self.gpus is None or self.gpus >= 1, "gpus", "must be at least 1", self.gpus)
        if self.gpu_memory is not None:
            is_number = re.fullmatch(r"\d+(\.\d*)?", self.gpu_memory)
            hint = f" (did you mean {self.gpu_memory}GB?)" if is_number else ""
            rule = f"must be an amount with its unit, such as 40GB or 80GiB{hint}"
            _require(bool(self.gpu_memory_bytes), "gpu_memory", rule, self.gpu_memory)
        finite = self.bandwidth is None or 0 < self.bandwidth < float("inf")
        _require(finite, "bandwidth", "must be positive, in GB/s", self.bandwidth)
        _require(self.prompt_length >= 1, "prompt_length", "must be at least 1", self.prompt_length)

    @property
    def gpu_memory_bytes(self) -> int | None:
        """`gpu_memory` in bytes; None where it is not set or is no amount."""
        units = {"m": 2, "g": 3, "t": 4}
        found = re.fullmatch(r"(\d+(?:\.\d*)?) ?([mgt])(i?)b?", self.gpu_memory or "", re.IGNORECASE)
        return found and round(float(found[1]) * (1024 if found[3] else 1000) ** units[found[2].lower()])
