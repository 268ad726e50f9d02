"""The runners of a loaded pair, and the calls of its arms.

The runners `compiled` and `static` have a KV cache of fixed size. `eager` rolls back to a copy of the state, and works
with every model. A model that cannot have the run's runner gets a plainer one.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from harness.config.acceptance_rules import RULES
from harness.config.errors import RunError, SettingError
from harness.config.settings import DecodingSettings
from harness.engines.record import Preparation
from harness.local.decoding.iteration import BatchSize, Calls
from harness.local.decoding.verify import AcceptByCoin, Offer, Verdict
from harness.local.decoding.warp import BatchWarp, Warp
from harness.local.drafting.checked import blaming_method, checked_rule, drafters_of, method_of
from harness.local.drafting.method import MakeDrafter, Pair
from harness.local.models.checkpoints import is_recurrent
from harness.local.models.loading import LoadedModel
from harness.local.runners.base import Options, UnsupportedModelError
from harness.local.runners.prepared import PreparedCalls
from harness.local.runners.snapshot import SnapshotRunner
from harness.local.runners.static import StaticRunner

# For each model, the most tokens of a row for which its static runner was checked. A sweep runs many jobs
# with the same model, but checks it once.
_checked: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()


def warp_of(decoding: DecodingSettings) -> Warp:
    """Return the warp for these settings."""
    return Warp(decoding.temperature, decoding.top_k, decoding.top_p)


def num_random(decoding: DecodingSettings) -> int:
    """Return how many random numbers a row needs for each purpose: one for each position, and one that a verification
    reads after the end. If the rule redraws, each iteration needs K new ones in addition.
    """
    num_positions = decoding.max_new_tokens + 1
    if not RULES[decoding.rule].redraws:
        return num_positions
    return num_positions * (decoding.most_draft_tokens + 1)


@dataclass(kw_only=True)
class PairRunners:
    """The runners and drafters of a loaded pair.

    Attributes:
        pair: the models.
        target: the target's runner.
        draft: the runner of the draft model, if there is one.
        target_name: the name of the target's runner.
        draft_name: the name of the draft's runner; the target's name if it has none.
        setup_seconds: how long compiling and capturing took.
        is_spent: as for `Engine`.
        prepared: the prepared calls of the regular arm (False) and of the speculative one (True); empty if they could
            not be prepared.
        num_decided: the tokens that iterations have decided, those of prepared calls under True, the others under
            False.
    """

    pair: Pair
    target: StaticRunner | SnapshotRunner
    draft: StaticRunner | SnapshotRunner | None
    target_name: str
    draft_name: str
    setup_seconds: float = 0.0
    is_spent: bool = False
    prepared: dict[bool, PreparedCalls] = field(default_factory=dict)
    num_decided: Counter[bool] = field(default_factory=Counter)

    def calls(self, decoding: DecodingSettings, batch: BatchSize, *, drafts: bool) -> Calls:
        """Return the calls of an arm for a batch: prepared calls if they have room for the batch, and else plain calls.

        All questions of a run have the K and the rule that its calls were prepared for. Settings of a row, such as its
        warp, may be others.
        """
        prepared = self.prepared.get(drafts)
        if prepared is not None and prepared.has_room(batch):
            return prepared
        return self.plain_calls(decoding, drafts=drafts)

    def plain_calls(
        self,
        decoding: DecodingSettings,
        *,
        drafts: bool,
        make: type[Calls] = Calls,
        warp: BatchWarp | None = None,
    ) -> Calls:
        """Return an arm's calls, not prepared.

        Args:
            make: the class of the calls.
            warp: the warp that the calls and the drafter share; None for a new one.
        """
        warp = warp or BatchWarp()
        if not drafts:
            return make(self.target, warp=warp)
        return make(
            self.target,
            self.make_drafter(warp),
            decoding.most_draft_tokens,
            verification=verification_of(decoding),
            redraw=RULES[decoding.rule].redraws,
            warp=warp,
        )

    @functools.cached_property
    def make_drafter(self) -> MakeDrafter:
        """A function that makes a drafter. Only for a pair with a draft. It is created once, so that work which the
        method does for all drafters, such as reading a file, is done once.
        """
        settings = self.pair.draft_settings
        assert settings is not None
        return drafters_of(settings, self.pair, self.draft)

    def close(self) -> None:
        """Free caches and prepared calls, even if something still refers to the runners. They can be used again, with
        plain calls.
        """
        self.prepared.clear()
        self.target.close()
        if self.draft is not None:
            self.draft.close()


def verification_of(decoding: DecodingSettings) -> Callable[[Offer], Verdict]:
    """Return the function that verifies proposals: acceptance at given rates (`synthetic_acceptance`), or the rule. A
    user's rule is checked.
    """
    rates = decoding.synthetic_rates
    if rates is not None:
        return AcceptByCoin(rates)
    rule = RULES[decoding.rule].verification(decoding)
    if RULES.is_built_in(decoding.rule):
        return rule
    return checked_rule(rule, decoding.rule)


@torch.inference_mode()
def open_runners(pair: Pair, preparation: Preparation) -> PairRunners:
    """Build and check the runners of a pair: one for the target, and one for a draft model.

    Raises:
        SettingError: no runner can read a model in the way that the run needs.
        RunError: the draft method asks for layers that the target does not have, or a user's method fails.
    """
    settings = pair.draft_settings
    layers: tuple[int, ...] = ()
    if settings is not None:
        with blaming_method(settings):
            layers = tuple(method_of(settings).layers(pair))
        most = pair.target.model.config.get_text_config(decoder=True).num_hidden_layers
        if layers and not 0 <= min(layers) <= max(layers) <= most:
            rule = f"layers() asks for layers {layers}, and the model has {most}"
            raise RunError(f"draft={settings.name}: {rule}")
    options: Options = {
        "vocabulary_size": pair.vocabulary_size,
        "hidden_layers": layers,
    }
    demand = preparation.demand
    takes_back = settings is not None
    target = _build("model", pair.target, preparation, options, demand.slots, takes_back=takes_back)
    draft: StaticRunner | SnapshotRunner | None = None
    if pair.draft is not None:
        options = {"vocabulary_size": pair.vocabulary_size}
        draft = _build("draft", pair.draft, preparation, options, demand.slots, takes_back=True)
    return PairRunners(
        pair=pair,
        target=target,
        draft=draft,
        target_name=target.name,
        # A draft without a runner, such as a text method, has the name of the target's.
        draft_name=target.name if draft is None else draft.name,
    )


def _build(
    role: str,
    loaded: LoadedModel,
    preparation: Preparation,
    options: Options,
    num_slots: int,
    *,
    takes_back: bool,
) -> StaticRunner | SnapshotRunner:
    """Build a runner for a model and check it: the static runner unless `runner=eager`, or else the snapshot runner.

    Args:
        role: `model` for the target, or `draft`, for errors.
        num_slots: `Demand.slots`, the most tokens of a row.
        takes_back: whether the runner will be rolled back, and so reads several tokens at once.

    Raises:
        SettingError: the model cannot be read in the way that the run needs.
    """
    model = loaded.model
    name = loaded.settings.name
    if preparation.runner != "eager":
        try:
            if is_recurrent(model.config):
                raise UnsupportedModelError("has a recurrent state")
            static = StaticRunner(model, **options)
            if _checked.get(model, 0) < num_slots:
                static.check(num_slots)
                _checked[model] = num_slots
        except UnsupportedModelError as reason:
            preparation.say(f"{name} {reason}; it runs with runner=eager")
        else:
            return static

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
