"""The parts of a run's settings: models, placement, decoding, prompts. Frozen dataclasses that hold no wrong value.

`conversion.py` makes them from a composed configuration. Each class checks itself in `__post_init__`; an error names
setting, rule and value, and the conversion adds the group that the setting is in.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from harness.config.errors import SettingError

Quantization = Literal["none", "8bit", "4bit"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Strategy = Literal["auto", "balanced", "sequential", "single", "cpu", "tensor_parallel"]
Rule = Literal["deepmind", "google", "block", "typical"]
Method = Literal["model", "lookup", "suffix", "early_exit", "mtp", "server", "new_head"]
TooLong = Literal["refuse", "skip", "truncate"]

_LARGEST_K = 1024
# Which methods a setting of the draft is for; the others are for all.
_OF_METHODS: dict[str, tuple[Method, ...]] = {
    "layers": ("model", "early_exit"),
    **dict.fromkeys(("max_ngram", "min_ngram"), ("lookup",)),
    "threshold": ("model", "suffix"),
    **dict.fromkeys(("max_depth", "shared"), ("suffix",)),
}
# `auto` chooses K in every iteration, at most so many.
NumDraftTokens = int | Literal["auto"]
MOST_DRAFT_TOKENS = 16


def require(holds: bool, setting: str, rule: str, value: object) -> None:
    """Raises SettingError, with setting, rule and value, unless the rule holds."""
    if not holds:
        raise SettingError(setting, rule, value)


def require_at_least(settings: object, **least: float) -> None:
    """Raises SettingError for a field that is below its bound; None passes."""
    for name, bound in least.items():
        value = getattr(settings, name)
        rule = f"must be at least {bound}" if bound else "must not be negative"
        require(value is None or value >= bound, name, rule, value)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """One model: where its weights are, and how they are loaded.

    Attributes:
        name: as typed on the command line, `7B_8bit`.
        repository: a hub repository or a directory; the tokenizer comes from there too unless `tokenizer` is set.
        architecture: keyword arguments of the transformers configuration, including `model_type`, so that planning
            and random weights need no network. None for models named by path.
        dtype: of the weights that are not quantized; None for the run's.
        placement: strategy for this model alone; None for the run's.
        gpus: how many GPUs this model may use; None for the placement's.
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
        require_at_least(self, gpus=1)
        require(bool(self.repository), "repository", "must name a repository or a directory", "")


@dataclass(frozen=True, kw_only=True)
class DraftSettings(ModelSettings):
    """What proposes tokens: a draft model, a head on the target's hidden states, or a method without weights.

    Attributes:
        method: `model` is a model or a head, which its configuration decides; `lookup` and `suffix` find what followed
            the same tokens before; `early_exit` is the target's own first layers; `mtp` is those in its checkpoint that
            predict several tokens; `server` is a server's own; `new_head` is for `distill` to train.
        layers: `early_exit`: how many layers, a quarter of the target's if None; a head: the hidden states it reads,
            where they are not those that its configuration names.
        sampling: `target` draws draft tokens as the target's are drawn, `greedy` takes the likeliest.
        max_ngram, min_ngram: `lookup`: tokens that must have occurred before, at most and at least.
        threshold: a proposal ends where an estimated chance falls below this. `suffix`: that all of it is accepted; 0.1
            if None. A head with a confidence head (DSpark): that the token is; if None, nothing is held back.
        max_depth: `suffix`: tokens of the longest sequence that is counted.
        shared: `suffix`: also search the earlier answers of the run.
    """

    repository: str = ""
    method: Method = "model"
    layers: tuple[int, ...] | None = None
    sampling: Literal["target", "greedy"] = "target"
    max_ngram: int = 3
    min_ngram: int = 1
    threshold: float | None = None
    max_depth: int = 24
    shared: bool = False

    def __post_init__(self) -> None:
        if self.method == "model":
            super().__post_init__()
        require_at_least(self, min_ngram=1, max_depth=1)
        rule = f"must be at least draft.min_ngram={self.min_ngram}"
        require(self.max_ngram >= self.min_ngram, "max_ngram", rule, self.max_ngram)
        require(0 <= self.least_chance <= 1, "threshold", "must be in [0, 1]", self.threshold)
        for field in fields(self):
            own, value = _OF_METHODS.get(field.name, (self.method,)), getattr(self, field.name)
            rule = (
                f"is for {' and '.join(own).replace('model', 'heads')}, not for draft={self.name}"
            )
            require(self.method in own or value == field.default, field.name, rule, value)
        rule = "must be one number, of the target's layers that draft"
        require(
            self.method != "early_exit" or len(self.layers or (1,)) == 1,
            "layers",
            rule,
            self.layers,
        )

    @property
    def least_chance(self) -> float:
        """`threshold`, or what the method has without one."""
        return (
            self.threshold
            if self.threshold is not None
            else 0.1
            if self.method == "suffix"
            else 0.0
        )


def without_others(draft: Mapping[str, Any], methods: Collection[str]) -> dict[str, Any]:
    """The configuration of a draft without settings that are for other ones of these methods, and not for its own."""
    own = {draft.get("method", "model")}
    others = {
        key
        for key, of in _OF_METHODS.items()
        if not own.intersection(of) and set(of).intersection(methods)
    }
    return {key: value for key, value in draft.items() if key not in others}


@dataclass(frozen=True, kw_only=True)
class PlacementSettings:
    """Which devices the layers are on.

    Attributes:
        strategy: `auto` takes the fewest GPUs that hold the model with its cache and draft, and balances the layers
            over them; `balanced` spreads them over all GPUs; `sequential` fills one GPU after the other; `single` takes
            one GPU; `cpu` takes none. On a machine without a GPU every strategy means the CPU. `tensor_parallel` splits
            every layer of the target over all GPUs, one process per GPU, and copies the draft to each;
            `draft.placement=tensor_parallel` splits the draft too.
        gpus: how many GPUs may be used, starting with the first visible one; None for all. With `tensor_parallel` on a
            CPU: how many processes share it.
        reserve_gb: kept free on each GPU, on top of weights and KV cache, for activations; in GB (10^9 bytes).
        offload: where layers that fit on no GPU go; `none` refuses them.
        device_map: an explicit map from module names to devices, for the target; overrides the strategy.
    """

    strategy: Strategy = "auto"
    gpus: int | None = None
    reserve_gb: float = 2.0
    offload: Literal["none", "cpu", "disk"] = "none"
    device_map: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        require_at_least(self, gpus=1, reserve_gb=0)

    def strategy_for(self, role: str, model: ModelSettings) -> Strategy:
        """The model's own strategy, else the run's. A draft is split over ranks only by its own setting."""
        copied = role == "draft" and self.strategy == "tensor_parallel"
        return model.placement or ("single" if copied else self.strategy)


@dataclass(frozen=True, kw_only=True)
class DecodingSettings:
    """How tokens are chosen and verified.

    Attributes:
        num_draft_tokens: K, tokens proposed per iteration; `auto` chooses it in every iteration.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose mass reaches this; 1 keeps all.
        rule: the acceptance rule: DeepMind's and Google's agree but for the lenience that only `google` has; `block`
            accepts whole blocks and is lossless too; `typical` accepts likely tokens, which is lossy.
        lenience: Leviathan's l in (0, 1]: accept with min(1, p / (l q)). Below 1 the output is no longer the target's.
        synthetic_acceptance: accept each draft token with this probability instead of by the rule, to see how fast a
            pair would be if its draft agreed that often; None for the rule.
        ignore_eos: continue after end-of-sequence so that every arm generates the same number of tokens.
    """

    num_draft_tokens: NumDraftTokens = 4
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
        rule = "must be at least 1, or auto (draft=none measures without a draft)"
        require(k == "auto" or k >= 1, "num_draft_tokens", rule, k)
        require(
            k == "auto" or k <= _LARGEST_K, "num_draft_tokens", f"must be at most {_LARGEST_K}", k
        )
        require(
            self.temperature >= 0,
            "temperature",
            "must not be negative (0 is greedy)",
            self.temperature,
        )
        # Dividing by less would overflow.
        rule = "must be 0 (greedy) or at least 0.0001"
        require(
            self.temperature == 0 or self.temperature >= 1e-4, "temperature", rule, self.temperature
        )
        require(self.top_k >= 0, "top_k", "must not be negative (0 keeps all)", self.top_k)
        require(0 < self.top_p <= 1, "top_p", "must be in (0, 1]", self.top_p)
        require_at_least(self, max_new_tokens=1)
        require(0 < self.lenience <= 1, "lenience", "must be in (0, 1]", self.lenience)
        rule = "below 1 needs decoding.rule=google; the other rules have no lenience"
        require(self.lenience == 1 or self.rule == "google", "lenience", rule, self.lenience)
        bias = self.synthetic_acceptance
        require(bias is None or 0 <= bias <= 1, "synthetic_acceptance", "must be in [0, 1]", bias)
        rule = "replaces the acceptance rule, so that lenience has no effect: leave one of them out"
        require(bias is None or self.lenience == 1, "synthetic_acceptance", rule, bias)

    @property
    def most_draft_tokens(self) -> int:
        """The largest K of an iteration."""
        return MOST_DRAFT_TOKENS if self.num_draft_tokens == "auto" else self.num_draft_tokens

    @property
    def lossy(self) -> bool:
        """Whether the output may differ in distribution from the target's own."""
        return self.lenience < 1 or self.rule == "typical" or self.synthetic_acceptance is not None


@dataclass(frozen=True, kw_only=True)
class PromptSettings:
    """A prompt set: a `.txt` file with one prompt per line, or a `.jsonl` file; see `experiments/prompts.py`.

    Attributes:
        too_long: where prompts do not fit into a model's context, the run is refused, they are left out,
            or only their last tokens are read.
    """

    name: str
    file: str
    too_long: TooLong = "refuse"

    def __post_init__(self) -> None:
        known = self.file.endswith((".txt", ".jsonl"))
        require(known, "file", "must be a preset, a .txt or a .jsonl file", self.file)


@dataclass(frozen=True, kw_only=True)
class ResultSettings:
    """Where rows go. `file` collects the rows of every run; relative to the working directory; None collects none."""

    file: str | None

    def __post_init__(self) -> None:
        require(self.file != "", "file", "must name a file; null collects no rows", "")
