"""The settings that all commands share, and those of several commands. They cannot hold a wrong value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from harness.config.engines import Abilities, EngineSettings
from harness.config.model_names import is_head
from harness.config.settings import (
    NO_DRAFT_TOKENS,
    DecodingSettings,
    DraftSettings,
    Dtype,
    ModelSettings,
    PlacementSettings,
    PromptSettings,
    ResultSettings,
    require,
    require_at_least,
)

WeightsSource = Literal["stored", "random"]
RunnerName = Literal["auto", "eager", "static", "compiled"]
# The end of a runner's name in rows if the runner is on a GPU but without CUDA graphs, so that the host launches each
# kernel separately.
NO_GRAPHS = ", no graphs"
ChatTemplate = Literal["auto", "always", "never"]

_LOCAL = EngineSettings()
# The largest value of `repeats`.
MOST_REPEATS = 1000


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings that all commands have.

    Attributes:
        model: the target, whose output is wanted.
        draft: what proposes tokens; None measures the target alone.
        decoding: how tokens are chosen.
        placement: where the models are.
        results: where rows go.
        dtype: number format of weights that are not quantized; `auto` is float32 on a CPU. On a GPU it is float16 for
            checkpoints in float16, weights in 8 bits and GPUs without bfloat16, and otherwise bfloat16.
        seed: seed of the random numbers; the prompts of a set are chosen by `prompts.seed`.
        batch_size: number of rows that are decoded together.
        chat_template: whether prompts go through the tokenizer's chat template; `auto` means: if it has one.
        resume: in a sweep, reuse earlier measurements made under the same circumstances; `always` also reuses those of
            servers that the harness started, that report no start time, or that have restarted.
        job_timeout_s: time after which a sweep ends a job; None for no limit.
        force: load the pair even if the plan says that it does not fit.
        weights: `random` builds models with random weights from their configurations alone, to measure times without a
            download.
        runner: how the models run. `eager` runs them as they are; `static` uses a cache of fixed size; `compiled`
            compiles them for such a cache. On a GPU `static` and `compiled` run as CUDA graphs, and `auto` is
            `compiled` for latency and recovery and `static` for the others. On a CPU `auto` is `static`.
        engine: who generates.
    """

    model: ModelSettings
    draft: DraftSettings | None
    decoding: DecodingSettings
    placement: PlacementSettings
    results: ResultSettings
    dtype: Dtype = "auto"
    seed: int = 0
    batch_size: int = 1
    chat_template: ChatTemplate = "auto"
    resume: bool | Literal["always"] = True
    job_timeout_s: float | None = None
    force: bool = False
    weights: WeightsSource = "stored"
    runner: RunnerName = "auto"
    engine: EngineSettings = _LOCAL

    # Whether the command asks only the speculative arm of an engine in another process, unless two commands of servers
    # are typed after `--`.
    ASKS_SPECULATIVE_ALONE: ClassVar[bool] = False
    # Whether a preset may contain settings that only other commands have.
    IGNORES_OTHERS: ClassVar[bool] = False
    # Whether K=0 is allowed: the draft is then loaded but drafts nothing.
    MAY_IDLE: ClassVar[bool] = False
    # Whether the command compares times. Only then does `decoding.ignore_eos=auto` have a meaning.
    COMPARES_TIMES: ClassVar[bool] = False
    # The runner that `runner=auto` stands for on a GPU. `static` is ready immediately. `compiled` takes minutes to
    # prepare, and is for commands that compare times, or that test the kernels of such commands.
    GPU_RUNNER: ClassVar[RunnerName] = "static"

    def __post_init__(self) -> None:
        require_at_least(self, batch_size=1, seed=0)
        k = self.decoding.num_draft_tokens
        require(k != 0 or self.MAY_IDLE, "decoding.num_draft_tokens", NO_DRAFT_TOKENS, k)
        if not self.COMPARES_TIMES:
            ends = self.decoding.ignore_eos
            require(ends != "auto", "decoding.ignore_eos", "must be true or false", ends)
        rule = f"is a head that drafts for another model: draft={self.model.name}"
        is_model = not is_head(self.model.repository, self.model.architecture)
        require(is_model, "model", rule, self.model.name)
        timeout = self.job_timeout_s
        require(timeout is None or timeout > 0, "job_timeout_s", "must be positive", timeout)

    # `LatencySettings` overrides the following two properties.

    @property
    def is_until_precise(self) -> bool:
        """Whether the run ends as soon as its interval is narrow enough."""
        return False

    @property
    def num_over_starts(self) -> int:
        """The number of prompts that may be divided among several starts of the servers; 0 if none may be."""
        return 0

    @property
    def draft_sampling(self) -> str | None:
        """How draft tokens are drawn, `target` or `greedy`; None without a draft, or if the draft leaves no choice."""
        return None if self.draft is None else self.draft.sampling

    def require_single_rows(self, rule: str) -> None:
        """Raise a SettingError with this rule unless the batch size is 1."""
        require(self.batch_size == 1, "batch_size", rule, self.batch_size)

    def check_engine(self, engine: Abilities) -> None:
        """Raise a SettingError if this command cannot use the engine. Commands override this method."""

    @property
    def pair_identity(self) -> tuple[object, ...]:
        """Everything that determines which weights are loaded, and where.

        Runs with equal values can share a loaded pair, if their engines hold the same models
        (`engines.record.pair_key`).
        """
        return self.model, self.draft, self.placement, self.dtype, self.weights, self.force

    @property
    def models(self) -> dict[str, ModelSettings]:
        """The models by their roles: `model` is the target; `draft` is the draft, if that is a model with weights."""
        models = {"model": self.model}
        if isinstance(self.draft, ModelSettings):
            models["draft"] = self.draft
        return models

    @property
    def arms(self) -> tuple[str, ...]:
        """The names of the arms that a run measures; for a single server `regular`, also if it turns out to draft.

        With `ASKS_SPECULATIVE_ALONE`, the last of them is usually measured alone.
        """
        return ("regular",) if self.draft is None else ("regular", "speculative")

    @property
    def most_draft_tokens(self) -> int:
        """K; for `auto`, the first K; 0 without a draft."""
        return 0 if self.draft is None else self.decoding.most_draft_tokens


@dataclass(frozen=True, kw_only=True)
class RepeatedSettings(RunSettings):
    """Settings of the commands that are measured several times.

    Attributes:
        repeats: number of times that the run is measured, each time in a new process if it is above 1.
        repeat: which of these repetitions a run is, from 1; `repeats` sets it.
    """

    repeats: int = 1
    repeat: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = f"must be at most {MOST_REPEATS}"
        require(self.repeats <= MOST_REPEATS, "repeats", rule, self.repeats)
        require_at_least(self, repeats=1, repeat=1)

    @property
    def pair_identity(self) -> tuple[object, ...]:
        """The pair's identity and the number of the repetition, because each repetition needs a new process."""
        return *super().pair_identity, self.repeat

    @property
    def seed_of_run(self) -> int:
        """The seed of this repetition. If texts are sampled, the repetitions have the seeds `seed`, `seed` + 1 and so
        on; otherwise all have `seed`.
        """
        sampled = self.decoding.temperature > 0
        return self.seed + self.repeat - 1 if sampled else self.seed


@dataclass(frozen=True, kw_only=True)
class PromptedSettings(RunSettings):
    """Settings of the commands that decode a prompt set."""

    prompts: PromptSettings

    # Whether the command answers all turns of a conversation, or only the first.
    ANSWERS_TURNS: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "all is for latency; this command answers first turns"
        first = self.prompts.turns == "first"
        require(self.ANSWERS_TURNS or first, "prompts.turns", rule, self.prompts.turns)
