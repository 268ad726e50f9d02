"""What a run is made of: models, placement, decoding, prompts. Frozen dataclasses that cannot hold a wrong value.

`conversion.py` turns a composed configuration into these; everything past this room takes them. Each class checks
itself in `__post_init__` and says setting, rule and value when a rule is broken; the conversion adds where in the tree
the setting stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from harness.config.errors import SettingError

Quantization = Literal["none", "8bit", "4bit"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Strategy = Literal["balanced", "auto", "sequential", "single", "cpu", "tensor_parallel"]
Rule = Literal["deepmind", "google"]


def require(holds: bool, setting: str, rule: str, value: object) -> None:
    """Raises SettingError, with setting, rule and value, unless the rule holds."""
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
        require(self.gpus is None or self.gpus >= 1, "gpus", "must be at least 1", self.gpus)
        require(bool(self.repository), "repository", "must name a repository or a directory", "")


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
        require(self.gpus is None or self.gpus >= 1, "gpus", "must be at least 1", self.gpus)
        require(self.reserve_gb >= 0, "reserve_gb", "must not be negative", self.reserve_gb)

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
        require(k >= 1, "num_draft_tokens", "must be at least 1 (draft=none measures without a draft)", k)
        require(self.temperature >= 0, "temperature", "must not be negative (0 is greedy)", self.temperature)
        require(self.top_k >= 0, "top_k", "must not be negative (0 keeps all)", self.top_k)
        require(0 < self.top_p <= 1, "top_p", "must lie in (0, 1]", self.top_p)
        require(self.max_new_tokens >= 1, "max_new_tokens", "must be at least 1", self.max_new_tokens)
        require(0 < self.lenience <= 1, "lenience", "must lie in (0, 1]", self.lenience)
        require(
            self.lenience == 1 or self.rule == "google",
            "lenience",
            "below 1 needs decoding.rule=google; DeepMind's rule has no lenience",
            self.lenience,
        )
        bias = self.synthetic_acceptance
        require(bias is None or 0 <= bias <= 1, "synthetic_acceptance", "must lie in [0, 1]", bias)
        rule = "replaces the rule, and leaves lenience nothing to act on"
        require(bias is None or self.lenience == 1, "synthetic_acceptance", rule, bias)

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
        require(known, "file", "must be a preset, a .txt or a .jsonl file", self.file)


@dataclass(frozen=True, kw_only=True)
class ResultSettings:
    """Where rows go. `file` collects the arm rows of every run, relative to the working directory."""

    file: str
