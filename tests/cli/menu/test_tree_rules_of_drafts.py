"""Drafts that cannot propose trees are refused in one line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from architectures import random_model
from harness.config.errors import SettingError
from harness.local.drafting.head_kind import HeadKind
from harness.local.drafting.methods.model import ModelDraftSettings, check_tree_models
from tiny_checkpoints import as_checkpoint


class Chained(HeadKind):
    name = "chained"


class Branching(HeadKind):
    name = "branching"
    drafts_trees = True


def refusal(kind: HeadKind, **settings: Any) -> str:
    draft = ModelDraftSettings(name="head", repository="./head", tree="dynamic", **settings)
    with pytest.raises(SettingError) as refused:
        check_tree_models(
            draft, as_checkpoint(random_model("llama").config), SimpleNamespace(kind=kind)
        )
    return str(refused.value)


def test_a_kind_of_head_without_trees() -> None:
    assert "draft.tree=dynamic: must be chain" in refusal(Chained())


def test_a_threshold_ends_chains_alone() -> None:
    assert "draft.threshold=0.5: ends a chain" in refusal(Branching(), threshold=0.5)
