"""The runners of a loaded pair, prepared for the questions of a run, and its drafters.

`compiled` and `static` keep a KV cache of fixed size; `eager` rolls back to a copy of the state, and every model can
have it. A model that cannot have the runner that was asked for gets a plainer one.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from harness.config.errors import RunError, SettingError
from harness.config.settings import DecodingSettings
from harness.engines.record import Preparation
from harness.local.decoding.protocols import Drafter, Runner
from harness.local.decoding.warp import AnyWarp, Warp
from harness.local.drafting.checked import method_of
from harness.local.drafting.heads.drafter import CompiledDraft, HeadDrafter
from harness.local.drafting.method import MakeDrafter, Method, Pair
from harness.local.drafting.model import widths as draft_widths
from harness.local.models.checkpoints import is_recurrent
from harness.local.models.loading import LoadedModel
from harness.local.runners.base import Options, UnsupportedModelError
from harness.local.runners.snapshot import SnapshotRunner
from harness.local.runners.static import StaticRunner

# The tokens of a row up to which each model's static runner was checked: a sweep runs many jobs
# with the same model, and checks it once.
_checked: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()


def warp_of(decoding: DecodingSettings) -> Warp:
    """The warp that target and drafter share."""
    return Warp(decoding.temperature, decoding.top_k, decoding.top_p)


@dataclass(frozen=True, kw_only=True)
class PairRunners:
    """The runners and drafters of a loaded pair.

    Attributes:
        pair: the models.
        target: the target's runner.
        draft: the runner of the model that drafts, if one does.
        compiled_draft: the compiled proposals of a head, if one drafts and could be compiled.
        target_name: of the target's runner.
        draft_name: of the draft's; the target's where it has none.
    """

    pair: Pair
    target: Runner
    draft: Runner | None
    compiled_draft: CompiledDraft | None
    target_name: str
    draft_name: str

    def drafter(self, warp: AnyWarp) -> Drafter:
        """Make a drafter for a batch, of a pair with a draft.

        Args:
            warp: of the target's logits.
        """
        drafter = self._make_drafter(warp)
        if isinstance(drafter, HeadDrafter):
            drafter.compiled = self.compiled_draft
        return drafter

    @functools.cached_property
    def _make_drafter(self) -> MakeDrafter:
        """What the method has made ready for all batches, such as a file that it has read."""
        settings = self.pair.draft_settings
        assert settings is not None
        return method_of(settings).drafter(settings, self.pair, self.draft)

    def close(self) -> None:
        """Give back caches and compiled calls, even where something still refers to the runners."""
        for part in self._parts:
            part.close()

    @property
    def setup_seconds(self) -> float:
        """How long compiling took."""
        return sum(part.setup_seconds for part in self._parts)

    @property
    def _parts(self) -> list[Runner | CompiledDraft]:
        parts = (self.target, self.draft, self.compiled_draft)
        return [part for part in parts if part is not None]


def open_runners(pair: Pair, preparation: Preparation) -> PairRunners:
    """Build the runners of a pair: one for the target, one for a draft model, or a head's
    proposals.

    Raises:
        SettingError: for a model that the runner cannot read.
    """
    settings = pair.draft_settings
    method: Method | None = None
    num_draft_tokens = preparation.decoding.most_draft_tokens
    widths = [1]
    layers: tuple[int, ...] = ()
    if settings is not None:
        method = method_of(settings)
        # A proposal is verified together with the token before it.
        widths.append(num_draft_tokens + 1)
        layers = tuple(method.layers(pair))
        most = pair.target.model.config.get_text_config(decoder=True).num_hidden_layers
        if layers and not 0 <= min(layers) <= max(layers) <= most:
            rule = f"layers() are {layers}, and the model has {most}"
            raise RunError(f"draft={settings.name}: {rule}")
    options: Options = {
        "vocabulary_size": pair.vocabulary_size,
        "hidden_layers": layers,
    }
    demand = preparation.demand
    target = _build("model", pair.target, preparation, options, widths, demand.slots())

    draft: Runner | None = None
    # A draft without a runner, such as a text method, goes by the target's.
    draft_name = target.name
    model = None if method is None else method.model(pair)
    if model is not None:
        widths = draft_widths(model.model.config, num_draft_tokens)
        options = {"vocabulary_size": pair.vocabulary_size}
        draft = _build("draft", model, preparation, options, widths, demand.slots(max(widths)))
        draft_name = draft.name

    compiled_draft: CompiledDraft | None = None
    if pair.head is not None and target.name == "compiled":
        compiled_draft = _compiled_draft(pair, preparation)
        draft_name = "static" if compiled_draft is None else "compiled"
    if "compiled" in (target.name, draft_name):
        # Tracing leaves garbage with the caches in it, which would stay: `timing` freezes what exists.
        gc.collect()
    return PairRunners(
        pair=pair,
        target=target,
        draft=draft,
        compiled_draft=compiled_draft,
        target_name=target.name,
        draft_name=draft_name,
    )


def _compiled_draft(pair: Pair, preparation: Preparation) -> CompiledDraft | None:
    """The compiled proposals of a pair's head; None where it drafts eagerly, of which the user is told."""
    settings = pair.draft_settings
    num_draft_tokens = preparation.decoding.most_draft_tokens
    if settings is None or not num_draft_tokens:
        return None
    drafter = method_of(settings).drafter(settings, pair, None)(warp_of(preparation.decoding))
    if not isinstance(drafter, HeadDrafter):
        return None
    try:
        num_slots = preparation.demand.slots()
        return CompiledDraft(
            drafter.head,
            drafter.warp,
            pair.target.model,
            preparation.batch_size,
            num_slots,
            num_draft_tokens,
        )
    except UnsupportedModelError as reason:
        preparation.say(f"{settings.name} {reason}; it drafts eagerly")
        return None


def _build(
    role: str,
    loaded: LoadedModel,
    preparation: Preparation,
    options: Options,
    widths: Sequence[int],
    num_slots: int,
) -> StaticRunner | SnapshotRunner:
    """A runner for a model.

    Args:
        role: `model` for the target, or `draft`; errors name it.
        widths: the numbers of tokens of an extension.
        num_slots: `Demand.slots` of a row.

    Raises:
        SettingError: for a model that cannot be read as the run would read it.
    """
    model = loaded.model
    name = loaded.settings.name
    if preparation.runner != "eager":
        try:
            if is_recurrent(model.config):
                raise UnsupportedModelError("has a recurrent state")
            static = StaticRunner(model, num_slots, **options)
            if _checked.get(model, 0) < num_slots:
                static.check(num_slots)
                _checked[model] = num_slots
        except UnsupportedModelError as reason:
            preparation.say(f"{name} {reason}; it runs with runner=eager")
        else:
            on_gpu = loaded.input_device.type == "cuda"
            if preparation.runner == "compiled" or (preparation.runner == "auto" and on_gpu):
                preparation.say(f"{name}: compiling")
                try:
                    static.compile(preparation.batch_size, num_slots, widths)
                except UnsupportedModelError as reason:
                    preparation.say(f"{name} {reason}; it runs with runner=static")
            return static

    # A target without a draft reads token by token, and is never rolled back.
    takes_back = max(widths) > 1
    snapshot = SnapshotRunner(model, takes_back=takes_back, keeps_first=role == "model", **options)
    try:
        snapshot.check(1, num_slots)
    except UnsupportedModelError as reason:
        tokens = "several tokens at once" if takes_back else "token by token"
        advice = "choose another"
        if role == "model" and takes_back:
            advice = "draft=none measures it alone"
        rule = f"cannot be used: reading {tokens}, it {reason}; {advice}"
        raise SettingError(role, rule, name) from reason
    try:
        snapshot.check(preparation.batch_size, num_slots)
    except UnsupportedModelError as reason:
        rule = f"must be 1 for {role}={name}: reading several rows at once, it {reason}"
        raise SettingError("batch_size", rule, preparation.batch_size) from reason
    return snapshot
