"""Figures that other projects and papers published, each with its source: what our own are shown beside."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from harness.results.labels import is_real

_SUFFIX = re.compile(r"_(?:([48]bit)|(\d+)GPUs?)$")


@dataclass(frozen=True, kw_only=True)
class Published:
    """One figure.

    Attributes:
        models: names that the target has here, in the order of `canonical_name`; empty where we have no such model.
        drafts: names of the draft; empty for the target alone.
        named: what its authors call the pair.
        hardware: as they name it; empty where they do not.
        ms_per_token: of the arm that the figure is of, speculative where there is a draft.
        speedup: lowest and highest that they give.
    """

    source: str
    named: str
    models: tuple[str, ...] = ()
    drafts: tuple[str, ...] = ()
    hardware: str = ""
    ms_per_token: float | None = None
    speedup: tuple[float, float] | None = None

    @property
    def speedup_text(self) -> str:
        """`1.80×`, `1.31× to 1.42×`, or nothing."""
        if self.speedup is None:
            return ""
        return " to ".join(f"{value:.2f}×" for value in dict.fromkeys(self.speedup))


def canonical_name(name: str, quantization: str | None = None) -> str:
    """`7B_4GPUs_8bit` -> `7B_8bit_4GPUs`; a quantization that was set apart from the name counts as a suffix.

    A repository that comes quantized says so in its name already.
    """
    bits, gpus = "", ""
    while "/" not in name and (match := _SUFFIX.search(name)):
        bits, gpus = match[1] or bits, match[2] or gpus
        name = name[: match.start()]
    if not bits and quantization in ("8bit", "4bit") and not name.endswith(quantization):
        bits = str(quantization)
    return name + (f"_{bits}" if bits else "") + (f"_{gpus}GPUs" if gpus else "")


def published_for(row: Mapping[str, Any]) -> list[Published]:
    """The figures of the pair in a row of `latency`: of pair and target, or of the target in a run without a draft.

    Random weights and synthetic acceptance have nothing published beside them.
    """
    if row.get("model") is None or not is_real(row):
        return []
    model = canonical_name(row["model"], row.get("quantization"))
    draft = canonical_name(row["draft"], row.get("draft_quantization")) if row.get("draft") else None
    return [
        figure
        for figure in FIGURES
        if model in figure.models and (not figure.drafts or (draft is not None and draft in figure.drafts))
    ]


_8_A100 = "8× A100 40 GB"
_G5 = "g5.12xlarge (4× A10G)"


def _llama_ssp(
    hardware: str, ms_per_token: float, model: str, draft: str = "", speedup: float | None = None
) -> Published:
    return Published(
        source="llama-ssp",
        named=f"{model} with {draft}" if draft else model,
        models=(model,),
        drafts=(draft,) if draft else (),
        hardware=hardware,
        ms_per_token=ms_per_token,
        speedup=(speedup, speedup) if speedup else None,
    )


_LLAMA3_70B = ("llama3.1_70B_4bit", "llama3.1_70B-bnb-4bit")
_LLAMA3_8B = ("llama3.1_8B_4bit", "llama3.1_8B-bnb-4bit")

FIGURES: tuple[Published, ...] = (
    _llama_ssp(_8_A100, 215, "7B_8bit"),
    _llama_ssp(_8_A100, 70, "7B"),
    _llama_ssp(_8_A100, 70, "7B_4GPUs"),
    _llama_ssp(_8_A100, 125, "13B"),
    _llama_ssp(_8_A100, 330, "30B"),
    _llama_ssp(_8_A100, 610, "65B"),
    _llama_ssp(_8_A100, 114, "13B", "7B", 1.1),
    _llama_ssp(_8_A100, 180, "30B", "7B", 1.8),
    _llama_ssp(_8_A100, 270, "65B", "7B", 2.25),
    _llama_ssp(_G5, 86, "7B_4GPUs"),
    _llama_ssp(_G5, 210, "7B_8bit"),
    _llama_ssp(_G5, 216, "7B_8bit_4GPUs"),
    _llama_ssp(_G5, 270, "13B_8bit"),
    _llama_ssp(_G5, 405, "30B_8bit"),
    _llama_ssp(_G5, 530, "65B_8bit"),
    _llama_ssp(_G5, 330, "13B", "7B_8bit"),
    _llama_ssp(_G5, 370, "30B", "7B_8bit"),
    Published(
        source="Speculative-Sampling",
        named="70B-4bit with 8B-4bit",
        models=_LLAMA3_70B,
        drafts=_LLAMA3_8B,
        hardware="2× A6000",
        ms_per_token=1000 / 4.68,
        speedup=(2.61, 2.61),
    ),
    Published(
        source="Speculative-Sampling",
        named="70B-4bit",
        models=_LLAMA3_70B,
        hardware="2× A6000",
        ms_per_token=1000 / 1.79,
    ),
    Published(
        source="Speculative-Sampling",
        named="gpt2-xl with gpt2",
        models=("gpt2-xl",),
        drafts=("gpt2",),
        speedup=(1.31, 1.42),
    ),
    Published(source="Speculative-Sampling", named="a model as its own draft", speedup=(0.96, 0.96)),
    Published(
        source="LLMSpeculativeSampling",
        named="OPT-13B with OPT-1.3B",
        models=("opt-13b",),
        drafts=("opt-1.3b",),
        speedup=(1.75, 1.78),
    ),
    Published(
        source="LLMSpeculativeSampling",
        named="OPT-6.7B with OPT-1.3B",
        models=("opt-6.7b",),
        drafts=("opt-1.3b",),
        speedup=(1.46, 1.51),
    ),
    Published(source="Leviathan et al. 2023", named="T5-XXL, γ = 7", speedup=(3.4, 3.4)),
    Published(source="Chen et al. 2023", named="Chinchilla 70B", ms_per_token=5.73, speedup=(2.46, 2.46)),
    Published(source="gpt-fast", named="70B-int4", speedup=(1.92, 1.92)),
)

# llama-ssp, products of numbers from 1 to 99: model -> arm -> proportion of right answers.
MULTIPLICATION_ACCURACY: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "7B": {"regular": 0.284, "speculative": 0.281},
        "13B": {"regular": 0.429, "speculative": 0.431},
        "30B": {"regular": 0.501, "speculative": 0.496},
    }
)
MULTIPLICATION_NOTE = (
    "Published: llama-ssp, seeds 0 to 3 with 1000 questions each, ± 1.4 (7B) or ± 1.5 percentage points."
)
