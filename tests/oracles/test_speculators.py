"""Every kind of head against speculators' own modules, saved by them and loaded here. See environment.sh."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from architectures import VOCABULARY
from head_references import Expected, check_saved
from small_heads import WINDOW, layer_config, target_model

pytestmark = pytest.mark.oracle
speculators = pytest.importorskip("speculators")

K, REDUCED, LAYERS, MASK = 4, 60, [1, 2, 3], 96
TOKENS = (
    torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))[:REDUCED].sort().values
)


def build(kind: str, style: str, num_layers: int, reduced: bool, **changes: Any) -> Any:
    """A head of theirs with random weights."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    if kind == "eagle3":
        from speculators.models.eagle3 import Eagle3DraftModel as Model
        from speculators.models.eagle3 import Eagle3SpeculatorConfig as Config
    elif kind == "dflash":
        from speculators.models.dflash import DFlashDraftModel as Model
        from speculators.models.dflash import DFlashSpeculatorConfig as Config
    else:
        from speculators.models.dspark.config import DSparkSpeculatorConfig as Config
        from speculators.models.dspark.core import DSparkDraftModel as Model

    own = layer_config(style, num_layers, **changes.pop("own", {}))
    own._attn_implementation = "eager"
    ids = "eagle_aux_hidden_state_layer_ids" if kind == "eagle3" else "aux_hidden_state_layer_ids"
    config = Config(
        transformer_layer_config=own,
        draft_vocab_size=REDUCED if reduced else VOCABULARY,
        speculators_config=SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=K)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **{ids: LAYERS},
        **changes,
    )
    model = Model(config)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
    if reduced:
        known = torch.zeros(VOCABULARY, dtype=torch.bool)
        known[TOKENS] = True
        model.load_vocab_mappings(known, TOKENS - torch.arange(REDUCED))
    return model.eval()


def logits_of(
    model: Any,
    kind: str,
    decided: Tensor,
    drawn: Tensor,
    features: Tensor,
    patch: pytest.MonkeyPatch,
) -> Tensor:
    """Their logits [K, V] for the tokens after `decided`, each after the ones that were `drawn` before it."""
    length, extra = len(features), 2 * K + 2
    seen: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(
        lambda module, inputs, output: seen.append(output[0])
    )
    flat = torch.cat([features.flatten(1), torch.zeros(extra, features[0].numel())])[None]
    text = torch.cat([decided, drawn, torch.zeros(extra + 1 - len(drawn), dtype=torch.long)])[None]
    common = {
        "hidden_states": flat,
        "document_ids": torch.zeros(1, flat.shape[1], dtype=torch.long),
    }
    training = {
        "loss_mask": torch.ones(1, flat.shape[1]),
        "verifier_last_hidden_states": torch.zeros(1, flat.shape[1], 32),
    }
    if kind == "eagle3":
        model(input_ids=text[:, 1 : flat.shape[1] + 1], ttt_steps=len(drawn), **common)
        found = torch.stack([logits[length - 1] for logits in seen])
    else:
        captured: list[Tensor] = []

        def compute_metrics(logits: Tensor, *args: Any, **kwargs: Any) -> tuple[None, None]:
            captured.append(logits[0])
            return None, None

        anchor = torch.tensor([length]), torch.tensor([True])
        patch.setattr("speculators.models.dflash.core.select_anchors", lambda *arguments: anchor)
        patch.setattr(f"speculators.models.{kind}.core.compute_metrics", compute_metrics)
        model(input_ids=text[:, : flat.shape[1]], max_anchors=1, **common, **training)
        found = captured[0][0 if model.config.sample_from_anchor else 1 :][: len(drawn)]
    hook.remove()
    return found


def expected_from(model: Any, kind: str, patch: pytest.MonkeyPatch) -> Expected:
    def expected(decided: Tensor, drawn: Tensor, features: Tensor) -> Tensor:
        logs = logits_of(model, kind, decided, drawn, features, patch).log_softmax(-1)
        if model.d2t is None:
            return logs
        return torch.full((len(logs), VOCABULARY), -torch.inf).index_copy_(1, TOKENS, logs)

    return expected


def with_all_layers(model: PreTrainedModel) -> PreTrainedModel:
    """A list of layers to return means other layers in the transformers that speculators needs than in newer ones."""
    forward = model.forward

    @functools.wraps(forward)
    def all_outputs(**arguments: Any) -> Any:
        return forward(
            **arguments | {"output_hidden_states": bool(arguments.get("output_hidden_states"))}
        )

    model.forward = all_outputs  # type: ignore[method-assign]
    return model


BLOCK = {"block_size": K + 1, "mask_token_id": MASK}
CASES: dict[str, tuple[str, str, int, bool, dict[str, Any]]] = {
    "EAGLE-3": ("eagle3", "llama", 1, True, {}),
    "EAGLE-3, norms before": (
        "eagle3",
        "qwen3",
        1,
        False,
        {"norm_before_residual": True, "norm_before_fc": True},
    ),
    "EAGLE-3, two layers with a window": ("eagle3", "qwen3", 2, False, {"own": WINDOW}),
    "EAGLE-3.1": ("eagle3", "llama", 1, True, {"fc_norm": True, "norm_output": True}),
    "DFlash": ("dflash", "qwen3", 2, False, BLOCK),
    "DFlash, reduced vocabulary": ("dflash", "qwen3", 3, True, BLOCK),
    "DFlash, causal window": ("dflash", "qwen3", 2, False, BLOCK | {"own": WINDOW}),
    "DFlash, window": (
        "dflash",
        "qwen3",
        2,
        False,
        BLOCK | {"own": WINDOW, "sliding_window_non_causal": True},
    ),
    "DSpark": ("dspark", "qwen3", 2, True, BLOCK | {"markov_rank": 8}),
    "DSpark, not from the anchor": (
        "dspark",
        "qwen3",
        2,
        False,
        BLOCK | {"markov_rank": 8, "sample_from_anchor": False},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_theirs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, style, num_layers, reduced, changes = CASES[name]
    theirs = build(kind, style, num_layers, reduced, **changes)
    target = with_all_layers(target_model())
    with torch.no_grad():
        theirs.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        theirs.lm_head.weight.copy_(
            target.get_output_embeddings().weight[TOKENS if reduced else slice(None)]
        )
    theirs.save_pretrained(tmp_path)
    # In training their window of a drafted position ends at the first one's.
    k = 1 if kind == "eagle3" and "own" in changes else K
    check_saved(tmp_path, kind, target, expected_from(theirs, kind, monkeypatch), k)
