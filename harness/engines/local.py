"""Our own decoding loop as an engine: a loaded pair, the runners that suit its devices, and a drafter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.config.errors import RunError
from harness.config.run import RunnerName
from harness.config.settings import DecodingSettings, Fault
from harness.decoding.adaptive import Adaptive
from harness.decoding.batch import Records, Request
from harness.decoding.decisions import Decision, Draw, Judge
from harness.decoding.loops import autoregressive, speculative
from harness.decoding.protocols import NonFiniteError, Runner
from harness.decoding.randomness import uniforms
from harness.decoding.rules import verify_block, verify_typical
from harness.decoding.synthetic import AcceptByCoin
from harness.decoding.verify import Offer, Verdict, verify
from harness.decoding.warp import BatchWarp, Warp
from harness.engines.faults import LENIENCE, RollbackOffByOne, faulty_verification
from harness.engines.pair import Pair
from harness.engines.protocol import Arm, Engine, Question
from harness.engines.runner_choice import build_runner
from harness.engines.stopwatches import Phases
from harness.menu.method import MakeDrafter
from harness.menu.records import make_drafter, method_of
from harness.models.quantization import eight_bit_layers
from harness.models.ranks import of_rank_0
from harness.models.tokenizers import vocabulary_size
from harness.runners.compiled import PreparedRunner
from harness.runners.shared_prefix import sharing

# The numbers of draft tokens that `auto` chooses from where each takes time to prepare.
_PREPARED = (1, 2, 4, 8)

# The other rules are `verify`.
_RULES: dict[str, Callable[[Offer], Verdict]] = {"block": verify_block, "typical": verify_typical}


@dataclass(frozen=True)
class LocalArm(Arm):
    """An arm of the local engine: `decode` runs one of the two loops."""

    name: str
    decode: Callable[[Request, DecodingSettings], Records]
    pair: Pair
    tells = frozenset({"origins", "proposals", "probabilities"})

    def stream(self, question: Question) -> Records:
        """See `Arm.stream`. It takes a `batch.Change` after each record."""
        return self._explained(self.decode(self.request(question), question.decoding))

    def request(self, question: Question) -> Request:
        """The loop's form of a question, at its start or when the question joins one that runs."""
        decoding = question.decoding
        num_positions = decoding.max_new_tokens + 1
        if self.name == "speculative" and decoding.rule == "block":
            # Its iterations draw new numbers, see `speculative`; a longer stream begins with the shorter one.
            num_positions *= decoding.most_draft_tokens + 1
        return Request(
            prompts=question.prompts,
            uniforms=uniforms(
                question.seed, question.indices, num_positions, self.pair.target.input_device
            ),
            warp=_warp(decoding),
            max_new_tokens=decoding.max_new_tokens,
            stop_tokens=question.stop_tokens,
        )

    def _explained(self, records: Records) -> Records:
        try:
            yield from records
        except NonFiniteError as error:
            raise not_finite(self.pair, error.role, f"new token {error.position}") from error


class LocalEngine(Engine):
    """An `Engine` over a loaded pair; logits of both models are cut to the vocabulary they share.

    Args:
        decoding: what runners are prepared for. Questions may differ from it, and are then answered more slowly.
        runner: which one; a model that cannot have it gets a plainer one, and `say` one line with the reason.
        batch_size: the most rows of a batch, and
        longest_prompt: the most tokens of a prompt that a runner is prepared for.
        share_prefix: read the common beginning of a batch's prompts only once.
        fault: a mistake to plant in the speculative arm.

    Raises:
        SettingError: for a runner that the devices do not have.
    """

    def __init__(
        self,
        pair: Pair,
        decoding: DecodingSettings,
        *,
        runner: RunnerName = "auto",
        batch_size: int = 1,
        longest_prompt: int = 0,
        share_prefix: bool = False,
        fault: Fault = "none",
        say: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._pair, self._fault, self.devices = pair, fault, pair.devices
        self._device = pair.target.input_device
        method = None if pair.drafting is None else method_of(pair.drafting)
        size, k, warp = pair.vocabulary_size, decoding.most_draft_tokens, _warp(decoding)
        slots = longest_prompt + decoding.max_new_tokens + k + 1
        auto = decoding.num_draft_tokens == "auto"
        numbers = [count for count in _PREPARED if count <= k] if auto else [k]
        widths = (
            (1,)
            if pair.drafting is None and pair.draft is None
            else (1, *(count + 1 for count in numbers))
        )
        layers = () if method is None else tuple(method.layers(pair))
        build = functools.partial(build_runner, runner=runner, vocabulary_size=size, say=say)
        shapes = (batch_size, slots, widths, (), warp, _decisions(pair, decoding, fault, widths))
        self._target, name = build(pair.target, shapes=shapes, hidden_layers=layers)
        draft_runner: Runner | None = None
        self.runner = str(name)
        self._draft_model = None if method is None else method.model(pair)
        if (model := self._draft_model) is not None:
            drawn: Sequence[int] = numbers
            if (
                pair.translation is not None
            ):  # its logits are those of its own tokens, and others draw from them
                build, drawn = (
                    functools.partial(build, vocabulary_size=vocabulary_size(model.model.config)),
                    (),
                )
            draft_runner, draft_name = build(
                model, shapes=(batch_size, slots, (1, 2), drawn, warp), drafts=True
            )
            self.runner = name if name == draft_name else f"{name}+{draft_name}"
        runners = (self._target, draft_runner)
        prepared = any(isinstance(runner, PreparedRunner) for runner in runners)
        if prepared and pair.head is not None and pair.drafting is not None:
            say(
                f"{pair.drafting.name} drafts without runner={name}, which no head can have: it could be faster"
            )
        self._choices = [0, *numbers] if prepared else range(k + 1)
        # Only there does a device wait for the host. Elsewhere working ahead would just delay records.
        self._ahead = prepared and self._device.type == "cuda"
        self.setup_seconds = sum(
            runner.setup_seconds for runner in runners if isinstance(runner, PreparedRunner)
        )
        if share_prefix:
            self._target = sharing(self._target)
            draft_runner = draft_runner and sharing(draft_runner)
        self._make_drafter: MakeDrafter | None = None
        if method is not None:
            self._make_drafter = make_drafter(pair, draft_runner, size)
        self.arms: list[Arm] = self._arms()

    @property
    def reference(self) -> LocalEngine:
        """See `Engine.reference`."""
        return self

    @property
    def vocabulary_size(self) -> int:
        """See `Reference`."""
        return self._pair.vocabulary_size

    @property
    def logit_rounding(self) -> float:
        """See `Reference`.

        4 units of the format in half precision, where rounding the logits themselves is most of it; 16 in float32,
        where the roundings of all layers add up (0.9 and 6 per logit were seen in 24 layers). With activations in 8
        bits it is 4 steps of those, in any format of the rest.
        """
        if getattr(self._pair.target.model, "is_loaded_in_8bit", False):
            return 4 / 127
        format_info = torch.finfo(self._pair.target.dtype)
        return (4 if format_info.bits == 16 else 16) * format_info.eps

    def watched(self) -> Sequence[tuple[Arm, Phases]]:
        """See `Engine.watched`."""
        clocks = [Phases(self.devices) for _ in self.arms]
        return [(self._arms(phases)[number], phases) for number, phases in enumerate(clocks)]

    def logits(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]] | None = None
    ) -> Tensor:
        """See `Reference.logits`."""
        logits = self._target.start(prompts).logits
        if continuations is not None and continuations[0]:
            logits = self._target.extend(torch.tensor(continuations, device=logits.device)).logits[
                :, -1
            ]
        if not (finite := logits.amax(-1).isfinite()).all():
            row = finite.tolist().index(False)
            length = len(prompts[row]) + (0 if continuations is None else len(continuations[row]))
            raise not_finite(self._pair, "model", f"token {length} of prompt and text")
        return logits.float()

    def draft_probabilities(
        self,
        prompts: Sequence[Sequence[int]],
        first_tokens: Sequence[int],
        decoding: DecodingSettings,
    ) -> Tensor | None:
        """See `Reference.draft_probabilities`."""
        if self._make_drafter is None:
            return None
        drafter = self._make_drafter(_warp(decoding))
        drafter.start(prompts, first_tokens, self._target.start(prompts))
        probabilities = drafter.propose(
            1, torch.zeros(len(prompts), 1, device=self._device)
        ).probabilities
        return None if probabilities is None else probabilities[:, 0]

    def _arms(self, phases: Phases | None = None) -> list[Arm]:
        # It keeps learning from question to question.
        policy = Adaptive(self._choices)
        target: Any = self._target
        if phases:
            target = phases.watch(
                "forward", target, "decide", eight_bit_layers(self._pair.target.model)
            )

        def regular(request: Request, decoding: DecodingSettings) -> Records:
            return autoregressive(target, request, self._ahead, of_rank_0)

        def with_draft(request: Request, decoding: DecodingSettings) -> Records:
            assert self._make_drafter is not None
            warp = BatchWarp()
            drafter: Any = self._make_drafter(warp)
            if phases:
                model = self._draft_model
                drafter = phases.watch(
                    "drafting", drafter, "propose", eight_bit_layers(model.model) if model else ()
                )
            k = decoding.num_draft_tokens
            verification, lenience = _acceptance(decoding, self._fault)
            return speculative(
                RollbackOffByOne(target) if self._fault == "rollback_off_by_one" else target,
                drafter,
                request,
                policy if k == "auto" else k,
                lenience,
                verification,
                redraw=decoding.rule == "block",
                warp=warp,
                ahead=self._ahead,
                agree=of_rank_0,
            )

        arms: list[Arm] = [LocalArm("regular", regular, self._pair)]
        return (
            arms
            if self._make_drafter is None
            else [*arms, LocalArm("speculative", with_draft, self._pair)]
        )


def not_finite(pair: Pair, role: str, place: str) -> RunError:
    """The error for logits of a model, by its role, that are no numbers."""
    loaded = pair.draft if role == "draft" and pair.draft is not None else pair.target
    name = (
        pair.drafting.name
        if role == "draft" and pair.drafting is not None
        else loaded.settings.name
    )
    held = str(loaded.dtype).removeprefix("torch.")
    what = f"{role}: {name} gives logits that are nan or infinite in {held}, at {place}"
    # bfloat16 has the range of float32; a draft that is no model computes in the target's format.
    wider = {"float16": "bfloat16 or float32", "bfloat16": "float32"}.get(held)
    setting = "model.dtype" if loaded is pair.target else "draft.dtype"
    advice = (
        f"its numbers overflow: try {setting}={wider}, or check its weights"
        if wider
        else "check its weights"
    )
    return RunError(f"{what}; {advice}")


def _acceptance(
    decoding: DecodingSettings, fault: Fault
) -> tuple[Callable[[Offer], Verdict], float]:
    """Return the rule of acceptance and its lenience, with the fault in them: equal for equal settings."""
    bias = decoding.synthetic_acceptance
    rule = _RULES.get(decoding.rule, verify) if bias is None else AcceptByCoin(bias)
    lenience = LENIENCE if fault == "lenience" else decoding.lenience
    return faulty_verification(fault, _warp(decoding), rule), lenience


def _decisions(
    pair: Pair, decoding: DecodingSettings, fault: Fault, widths: Sequence[int]
) -> dict[int, Decision]:
    """Return what the loops decide after extensions of these widths, where every row is offered all draft tokens."""
    # Only what finds its tokens in texts gives no probabilities.
    is_deterministic = pair.drafting is not None and method_of(pair.drafting).deterministic
    warp = _warp(decoding)
    verification, lenience = _acceptance(decoding, fault)
    judge = Judge(warp, verification, lenience, is_deterministic)
    return {width: judge if width > 1 else Draw(warp) for width in widths}


def _warp(decoding: DecodingSettings) -> Warp:
    """Target and drafter share it."""
    return Warp(decoding.temperature, decoding.top_k, decoding.top_p)
