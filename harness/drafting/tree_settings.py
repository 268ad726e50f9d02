"""Rules of drafts that propose trees: what refuses them, early and in one line."""

from __future__ import annotations

from typing import Any

from harness.config.acceptance_rules import RULES
from harness.config.errors import SettingError
from harness.config.run import RunSettings
from harness.config.settings import DraftSettings, require


def check_trees(run: RunSettings, *, own_loop: bool) -> None:
    """Raise a SettingError for a run that cannot decode with trees, where its draft proposes them.

    Args:
        own_loop: whether its engine has this project's own loop.
    """
    draft = run.draft
    decoding = run.decoding
    tree = getattr(draft, "tree", "chain")
    record = RULES[decoding.rule]
    if draft is None or not draft.most_nodes:
        rule = f"is for draft.tree={' or '.join(record.trees)}"
        require(record.of_chains, "decoding.rule", rule, decoding.rule)
        return
    of_trees = f"with draft.tree={tree}"
    require(own_loop, "draft.tree", "must be chain unless engine=local", tree)
    rules = [name for name, one in RULES.all().items() if tree in one.trees]
    rule = f"must be one of {', '.join(rules)} {of_trees}"
    require(tree in record.trees, "decoding.rule", rule, decoding.rule)
    require(decoding.lenience == 1, "decoding.lenience", f"must be 1 {of_trees}", decoding.lenience)
    rates = decoding.synthetic_acceptance
    require(rates is None, "decoding.synthetic_acceptance", f"must be null {of_trees}", rates)
    rule = "must be chain with tensor_parallel"
    require(not run.tensor_parallel, "draft.tree", rule, tree)


def check_tree_models(settings: Any, target: Any, head: Any, draft: Any) -> None:
    """Raise a SettingError for models that cannot have trees.

    Args:
        settings: of the draft.
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


def plan_of(settings: DraftSettings) -> Any:
    """Return the `TreePlan` of a draft's settings: how its trees grow."""
    from harness.drafting.trees.plan import TreePlan

    described: Any = settings
    return TreePlan(
        described.tree,
        described.budget,
        described.rates,
        described.score_temperature,
    )
