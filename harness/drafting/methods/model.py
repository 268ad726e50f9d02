"""A draft model, or a head on the target's hidden states; the configuration in a repository says
which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from harness.config.errors import SettingError
from harness.config.settings import DecodingSettings, DraftSettings, ModelSettings, require
from harness.drafting.method import (
    LoadedPair,
    MakeDrafter,
    Method,
    Passes,
)

if TYPE_CHECKING:
    from harness.decoding.protocols import Runner, TreeRunner
    from harness.decoding.warp import AnyWarp, Warp
    from harness.drafting.heads.find import DraftPlan, HeadCheckpoint
    from harness.drafting.trees.plan import TreePlan
    from harness.models.checkpoints import Checkpoint, ReadCheckpoint
    from harness.models.loading import LoadedModel

Sampling = Literal["target", "greedy"]
Tree = Literal["chain", "static", "dynamic"]

# How often a node's first, second, ... child was accepted when measured, in round numbers.
_RATES = (0.7, 0.15, 0.06, 0.03, 0.02, 0.01)
_MOST_NODES = 256


@dataclass(frozen=True, kw_only=True)
class SampledDraftSettings(DraftSettings):
    """Settings of every draft that samples its tokens from a distribution.

    Attributes:
        sampling: `target` draws draft tokens as the target's are drawn, `greedy` takes the
            likeliest.
    """

    sampling: Sampling = "target"

    def warp(self, of_target: AnyWarp) -> AnyWarp:
        """Return the warp of the draft's logits, given the one of the target's."""
        from harness.decoding.warp import Warp

        return Warp(0) if self.sampling == "greedy" else of_target


class HeadMethod(Method):
    """A way to draft with a head, in chains."""

    settings = SampledDraftSettings

    def drafter(
        self, settings: SampledDraftSettings, pair: LoadedPair, runner: Runner | None
    ) -> MakeDrafter:
        """Return a function that makes drafters with the pair's head."""
        head = pair.head
        target = pair.target.model
        assert head is not None
        return lambda warp: head.drafter(target, settings.warp(warp))


@dataclass(frozen=True, kw_only=True)
class ModelDraftSettings(SampledDraftSettings, ModelSettings):
    """Settings of a draft model or a head: a draft with weights of its own.

    Attributes:
        layers: of a head: the hidden states it reads, where they are not those that its
            configuration names.
        threshold: of a head with a confidence head (DSpark): a proposal ends where the chance that
            a token is accepted falls below this; None holds nothing back.
        tree: a proposal is one `chain` of tokens or a tree of several, verified in one pass.
            `dynamic` keeps the likeliest of the branches it finds, as EAGLE-2 does; `static` trees
            have one shape. Their depth is decoding.num_draft_tokens.
        budget: the most draft tokens of a tree.
        rates: of a static tree: how often the first, second, ... child of a node is accepted; the
            tree is the best one for these.
        score_temperature: of a dynamic tree: nodes are scored by the draft's probabilities at this
            temperature, or at the run's if that is higher; 1 is what EAGLE-2 scores by in greedy
            decoding. `auto` chooses for each row, in every iteration, the temperature at which the
            draft's probabilities predicted the row's last tokens best.
    """

    method: str = "model"
    layers: tuple[int, ...] | None = None
    threshold: float | None = None
    tree: Tree = "chain"
    budget: int = 16
    rates: tuple[float, ...] = _RATES
    score_temperature: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        ModelSettings.__post_init__(self)
        known = self.threshold is None or 0 <= self.threshold <= 1
        require(known, "threshold", "must be in [0, 1]", self.threshold)
        within = 1 <= self.budget <= _MOST_NODES
        require(within, "budget", f"must be from 1 to {_MOST_NODES}", self.budget)
        possible = self.score_temperature == "auto" or self.score_temperature > 0
        require(possible, "score_temperature", "must be auto or positive", self.score_temperature)
        rates = self.rates
        possible = bool(rates) and all(0 <= rate <= 1 for rate in rates)
        require(possible, "rates", "must be a list of numbers in [0, 1]", rates)
        require(rates[0] > 0, "rates", "must begin with a number above 0", rates)

    @property
    def most_nodes(self) -> int:
        """The most draft tokens of a tree, 0 for chains."""
        return 0 if self.tree == "chain" else self.budget

    def tree_plan(self) -> TreePlan:
        """Return how the draft's trees grow; not for chains."""
        from harness.drafting.trees.plan import TreePlan

        assert self.tree != "chain"
        return TreePlan(self.tree, self.budget, self.rates, self.score_temperature)


class ModelDraft(Method):
    """A model of its own, or a head."""

    name = "model"
    summary = (
        "token by token, a parallel draft (PARD) in one pass; a head in the format of its writer, "
        "a model also with another tokenizer"
    )
    settings = ModelDraftSettings
    trains = True
    named = False

    def plan(
        self,
        settings: ModelDraftSettings,
        target: Checkpoint,
        read_checkpoint: ReadCheckpoint,
        needs_weights: bool,
    ) -> DraftPlan:
        """Return a plan with the target itself, a head or a draft model, by its configuration."""
        from harness.drafting.heads.find import DraftPlan, read_head
        from harness.drafting.parallel import checked_mask
        from harness.drafting.registry import HEADS

        identifying = [name for name in ModelSettings.__dataclass_fields__ if name != "name"]
        if all(getattr(target.settings, name) == getattr(settings, name) for name in identifying):
            plan = DraftPlan(settings, shares_target=True)
        else:
            kinds = HEADS.all().values()
            head = read_head(settings, target, kinds, layers=settings.layers, weights=needs_weights)
            if head is not None:
                plan = DraftPlan(settings, head=head)
            else:
                checkpoint = read_checkpoint("draft", settings)
                mask = checked_mask(settings.name, checkpoint.config)
                plan = DraftPlan(settings, checkpoint=checkpoint, mask_token=mask)
        if settings.threshold is not None and not (plan.head and plan.head.config.confidence):
            rule = f"is for suffix and heads with a confidence head (DSpark), not for draft={settings.name}"
            raise SettingError("draft.threshold", rule, settings.threshold)
        if settings.tree != "chain":
            check_tree_models(settings, target, plan.head, plan.checkpoint)
            rule = f"must be chain for draft={settings.name}, which drafts all tokens in one pass"
            require(plan.mask_token is None, "draft.tree", rule, settings.tree)
        return plan

    def describe(self, settings: ModelDraftSettings) -> str:
        """Describe a draft that is the target itself: no other draft is asked."""
        return "is the target itself: it shares its weights, always agrees and costs as much"

    def model(self, pair: LoadedPair) -> LoadedModel | None:
        """Return the draft model, None if the draft is a head."""
        return pair.draft

    def passes(self, pair: LoadedPair, numbers: Sequence[int]) -> Passes:
        """Return the shapes of a model that drafts token by token, or of a parallel draft.

        A parallel draft reads up to K decided tokens with K masks, and draws nothing by itself.
        """
        from harness.drafting.parallel import mask_token

        if pair.draft is None or mask_token(pair.draft.model.config) is None:
            return super().passes(pair, numbers)
        return Passes(widths=[2 * number for number in numbers], num_drawn=())

    def warp(self, settings: ModelDraftSettings, pair: LoadedPair, of_target: Warp) -> AnyWarp:
        """Return the sampled warp, restricted to common tokens if the tokenizers differ."""
        warp = settings.warp(of_target)
        return warp if pair.translation is None else pair.translation.drawing_warp(warp)

    def drafter(
        self, settings: ModelDraftSettings, pair: LoadedPair, runner: Runner | None
    ) -> MakeDrafter:
        """Return drafters with a head, for trees, in parallel, translated or plain, in this
        order.
        """
        from harness.drafting.model import ModelDrafter
        from harness.drafting.parallel import ParallelDrafter, mask_token
        from harness.drafting.translated import TranslatedDrafter
        from harness.drafting.trees.model_trees import ModelTreeDrafter

        plan = None if settings.tree == "chain" else settings.tree_plan()
        head = pair.head
        if head is not None:
            target = pair.target.model
            threshold = settings.threshold or 0.0  # 0 holds nothing back
            return lambda warp: head.drafter(target, settings.warp(warp), plan, threshold)
        assert pair.draft is not None
        assert runner is not None
        device = pair.target.input_device
        if plan is not None:
            rule = f"must be chain: draft={settings.name} has another tokenizer"
            require(pair.translation is None, "draft.tree", rule, settings.tree)
            tree_runner = cast("TreeRunner", runner)
            return lambda warp: ModelTreeDrafter(tree_runner, settings.warp(warp), plan, device)
        mask = mask_token(pair.draft.model.config)
        if mask is not None:
            rule = "drafts all tokens in one pass, and must have the model's tokenizer"
            require(pair.translation is None, "draft", rule, settings.name)
            return lambda warp: ParallelDrafter(runner, settings.warp(warp), mask, device)
        translation = pair.translation
        if translation is not None:
            return lambda warp: TranslatedDrafter(runner, translation, settings.warp(warp), device)
        return lambda warp: ModelDrafter(runner, settings.warp(warp), device)

    def vllm(self, plan: DraftPlan, settings: ModelDraftSettings) -> dict[str, Any]:
        """Return the entries for a draft model, or for a head of its kind."""
        in_one_pass = plan.mask_token is not None
        words = {"method": "draft_model", "parallel_drafting": in_one_pass}
        if plan.head is not None:
            words = plan.head.kind.vllm()
        return words | {
            "draft_sample_method": vllm_sampling(settings),
            "model": settings.repository,
            "revision": settings.revision,
            "quantization": VLLM_QUANTIZATIONS.get(settings.quantization),
        }

    def check_vllm(self, settings: ModelDraftSettings) -> None:
        """Refuse what only our own drafters of heads have."""
        rule = "must be null with engine=vllm, which reads the head's"
        require(settings.layers is None, "draft.layers", rule, settings.layers)
        rule = "is for suffix with engine=vllm"
        require(settings.threshold is None, "draft.threshold", rule, settings.threshold)

    def huggingface(
        self, pair: LoadedPair, settings: ModelDraftSettings, decoding: DecodingSettings
    ) -> dict[str, Any]:
        """Return the head, or the draft model with both tokenizers if the widths of their logits
        differ.
        """
        from harness.models.tokenizers import load_tokenizer, vocabulary_size

        if pair.head is not None:
            return pair.head.huggingface(pair.target.model)
        assert pair.draft is not None
        arguments: dict[str, Any] = {"assistant_model": pair.draft.model}
        widths = {vocabulary_size(loaded.model.config) for loaded in (pair.target, pair.draft)}
        if len(widths) > 1:
            # `generate` compares these widths to find out whether both have one tokenizer.
            other = load_tokenizer(pair.draft.settings, "draft")
            arguments |= {"tokenizer": pair.tokenizer, "assistant_tokenizer": other}
        return arguments


def check_tree_models(
    settings: ModelDraftSettings,
    target: Checkpoint | None,
    head: HeadCheckpoint | None,
    draft: Checkpoint | None,
) -> None:
    """Raise a SettingError for models that cannot have trees.

    Args:
        target: the target's checkpoint.
        head: of the draft, as planned, or None.
        draft: the checkpoint of a draft model, or None.
    """
    from harness.models.checkpoints import recurrent_kind

    for checkpoint in (target, draft):
        if checkpoint is not None and recurrent_kind(checkpoint.config) is not None:
            name = checkpoint.settings.name
            rule = f"must be chain: {name} has a recurrent state, which cannot branch"
            raise SettingError("draft.tree", rule, settings.tree)
    if head is not None and not head.kind.drafts_trees:
        rule = f"must be chain for draft={settings.name}: {head.kind.name} heads draft no trees"
        raise SettingError("draft.tree", rule, settings.tree)
    rule = f"ends a chain, and must be null with draft.tree={settings.tree}"
    require(settings.threshold is None, "draft.threshold", rule, settings.threshold)


# vLLM's words for `draft.quantization`, where it has one.
VLLM_QUANTIZATIONS = {"4bit": "bitsandbytes"}


def vllm_sampling(settings: SampledDraftSettings) -> str:
    """Return vLLM's word for how draft tokens are drawn. Its own default is greedy."""
    return "greedy" if settings.sampling == "greedy" else "probabilistic"


RECORD = ModelDraft()
