"""The runners of a loaded pair, and the calls of its arms.

With `runner=compiled` and `runner=static`, a model has a KV cache of fixed size (`StaticRunner`). With `runner=eager`,
it is rolled back to a copy of its state (`SnapshotRunner`), which works with every model. A model that does not support
the chosen runner gets a simpler one.
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

# For each model, the largest number of tokens per row for which its static runner was checked. It is kept because a
# sweep runs many jobs with the same model, and need not check it again.
_checked: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()


def warp_of(decoding: DecodingSettings) -> Warp:
    """Return the warp for these settings."""
    return Warp(decoding.temperature, decoding.top_k, decoding.top_p)


def num_random(decoding: DecodingSettings) -> int:
    """Return how many random numbers a row needs for each purpose: one for each position, and one more, which a
    verification reads after the last position. With a rule that redraws (`rule=block`), each iteration
    needs K further numbers, and there may be as many iterations as positions. With max_new_tokens=64 and K=4, the
    result is 65, or 65 + 65 * 4 for `rule=block`.
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
        draft: the runner of the draft model; None without a draft model.
        target_name: the name of the target's runner.
        draft_name: the name of the draft's runner. If the draft has no runner, the name of the target's runner,
            or `static` for a head that is not in prepared calls.
        setup_seconds: how long compiling and capturing took.
        is_spent: whether a capture has failed, as for `Engine`.
        prepared: the prepared calls of the regular arm (key False) and of the speculative arm (key True). Empty if
            calls were not prepared.
        num_decided: the number of tokens that iterations have decided so far: by prepared calls (key True), and by
            plain calls (key False).
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
        """Return the calls of an arm for a batch: prepared calls if the batch fits into them, otherwise plain calls.

        All questions of a run have the K and the rule that its calls were prepared for. Settings that are kept for each
        row, such as the temperature, may be others.

        Args:
            drafts: True for the speculative arm, False for the regular arm.
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
        """Return an arm's calls without preparing them.

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
        """A function that makes a drafter. The pair must have a draft.

        The function is created only once. So work that the draft method does for all drafters, such as reading a file,
        is done only once.
        """
        settings = self.pair.draft_settings
        assert settings is not None
        return drafters_of(settings, self.pair, self.draft)

    def close(self) -> None:
        """Free the caches and the prepared calls, even if something still refers to the runners. The runners can be
        used again afterwards, with plain calls.
        """
        self.prepared.clear()
        self.target.close()
        if self.draft is not None:
            self.draft.close()


def verification_of(decoding: DecodingSettings) -> Callable[[Offer], Verdict]:
    """Return the function that verifies proposals: the acceptance rule or, with `synthetic_acceptance`, a function that
    accepts at the given rates. The verdicts of a user's rule are checked.
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
    """Build and check the runners of a pair: one for the target and, if the draft is a draft model, one for the draft.

    Raises:
        SettingError: no runner can run a model in the way that the run needs.
        RunError: the draft method requests layers that the target does not have, or a user's method fails.
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
    # A regular arm alone never takes tokens back.
    target = _build("model", pair.target, preparation, options, rolls_back=settings is not None)
    draft: StaticRunner | SnapshotRunner | None = None
    if pair.draft is not None:
        options = {"vocabulary_size": pair.vocabulary_size}
        draft = _build("draft", pair.draft, preparation, options, rolls_back=True)
    return PairRunners(
        pair=pair,
        target=target,
        draft=draft,
        target_name=target.name,
        # A draft without a runner, such as `lookup`, gets the name of the target's runner.
        draft_name=target.name if draft is None else draft.name,
    )


def _build(
    role: str,
    loaded: LoadedModel,
    preparation: Preparation,
    options: Options,
    *,
    rolls_back: bool,
) -> StaticRunner | SnapshotRunner:
    """Build and check a runner for a model: a `SnapshotRunner` if `runner=eager`, or if the model does not support a
    `StaticRunner`; otherwise a `StaticRunner`.

    Args:
        role: `model` for the target, or `draft`, for errors.
        rolls_back: whether the runner will be rolled back. Then it also reads several tokens at once.

    Raises:
        SettingError: neither runner can run the model in the way that the run needs.
    """
    model = loaded.model
    name = loaded.settings.name
    num_slots = preparation.demand.slots
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

    snapshot = SnapshotRunner(model, rolls_back=rolls_back, keeps_first=role == "model", **options)
    # The first check has a single row. If only the second check fails, a smaller batch size helps.
    try:
        snapshot.check(1, num_slots)
    except UnsupportedModelError as reason:
        tokens = "several tokens at once" if rolls_back else "token by token"
        advice = "choose another"
        if role == "model" and rolls_back:
            advice = "draft=none measures it alone"
        rule = f"cannot be used: reading {tokens}, it {reason}; {advice}"
        raise SettingError(role, rule, name) from reason
    try:
        snapshot.check(preparation.batch_size, num_slots)
    except UnsupportedModelError as reason:
        rule = f"must be 1 for {role}={name}: reading several rows at once, it {reason}"
        raise SettingError("batch_size", rule, preparation.batch_size) from reason
    return snapshot
