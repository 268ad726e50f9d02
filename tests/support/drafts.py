"""Every way to draft for a small random target: a target, and a drafter for it that may be on another device."""

from collections.abc import Callable
from typing import Any

from accelerate import dispatch_model
from transformers import PreTrainedModel

from architectures import random_pair
from harness.local.decoding.warp import AnyWarp
from harness.local.drafting.method import LookupSettings
from harness.local.drafting.model import ModelDrafter
from harness.local.drafting.text import LookupText, TextDrafter
from harness.local.runners.static import StaticRunner
from mtp_models import mtp_target
from small_heads import (
    block_head,
    eagle_head,
    head_drafter,
    layer_config,
    medusa_head,
    mtp_head,
    target_model,
)

# A target on the first device, and a drafter for it with a warp, whose model is on the second.
Draft = Callable[..., tuple[PreTrainedModel, Any]]


def model(warp: AnyWarp, first: str = "cpu", second: str = "cpu") -> tuple[Any, Any]:
    target, draft = random_pair("llama")
    return target.to(first), ModelDrafter(StaticRunner(draft.to(second)), warp)


def agreeing(warp: AnyWarp) -> tuple[Any, Any]:
    target = target_model()
    return target, ModelDrafter(StaticRunner(target), warp)


def with_head(make_head: Callable[[], Any]) -> Draft:
    def draft(warp: AnyWarp, first: str = "cpu", second: str = "cpu") -> tuple[Any, Any]:
        target = target_model().to(first)
        return target, head_drafter(make_head().to(second), target, warp)

    return draft


def with_mtp(warp: AnyWarp, first: str = "cpu", second: str = "cpu") -> tuple[Any, Any]:
    target, layers = mtp_target("deepseek_v3")
    return target.to(first), head_drafter(mtp_head(layers).to(second), target, warp)


DRAFTS: dict[str, Draft] = {
    "model": model,
    "model that agrees": agreeing,
    "lookup": lambda warp, first="cpu", second="cpu": (target_model().to(first), lookup_drafter()),
    "EAGLE-3": with_head(lambda: eagle_head(layer_config("llama"))),
    "DFlash": with_head(block_head),
    "DSpark": with_head(lambda: block_head(from_anchor=True, markov_rank=6)),
    "Medusa": with_head(lambda: medusa_head(output_per_head=False)),
    "MTP": with_mtp,
}


def lookup_drafter(**settings: Any) -> TextDrafter:
    """A drafter as `draft=lookup` makes it."""
    chosen = LookupSettings(name="lookup", method="lookup", **settings)
    return TextDrafter(lambda: LookupText(chosen.max_ngram))


def spread(model: PreTrainedModel, first: str, second: str) -> PreTrainedModel:
    """All that comes after the first layer goes to the second device."""
    layers = [f"layers.{number}" for number in range(len(model.model.layers))]
    places = {f"model.{name}": first for name in ("embed_tokens", "rotary_emb", layers[0])}
    places |= {f"model.{name}": second for name in (*layers[1:], "norm")} | {"lm_head": second}
    skipped = model._skip_keys_device_placement
    return dispatch_model(model, places, main_device=first, skip_keys=skipped, force_hooks=True)
