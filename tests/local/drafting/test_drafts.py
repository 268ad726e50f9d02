"""Drafts of transformers alone, checks of a user's own drafters and rules, and MTP layers in a target's checkpoint."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, DynamicCache
from transformers.modeling_layers import MtpModel

from harness.config.errors import RunError, SettingError
from harness.config.settings import ModelSettings, PlacementSettings
from harness.local.decoding.protocols import Proposal
from harness.local.decoding.verify import Offer, verify
from harness.local.drafting.checked import CheckedDrafter, checked_rule
from harness.local.drafting.heads.mtp import MtpHead, read_mtp
from harness.local.drafting.method import EarlyExit, EarlyExitSettings, SampledDraftSettings
from harness.local.engine.pair import plan_pair
from harness.local.models.cache_names import cache_name
from harness.local.models.checkpoints import Checkpoint, read_checkpoint
from mtp_models import FAMILIES, mtp_target, save_with_mtp
from tiny_checkpoints import SMALL_DEMAND, as_checkpoint, make_config, make_tokenizer
from verifiers import offer_of


def test_a_quarter_of_the_layers_draft_unless_it_is_said() -> None:
    for total, asked, layers in [(32, None, 8), (3, None, 1), (24, (12,), 12)]:
        target = as_checkpoint(make_config("llama", num_hidden_layers=total))
        settings = EarlyExitSettings(name="early_exit", method="early_exit", layers=asked)
        planned: Any = EarlyExit().plan(settings, target, None).settings
        assert planned.layers == (layers,)


SIZE = 20
TOKENS = torch.zeros(1, 1, dtype=torch.long)
EVEN = torch.full((1, 1, SIZE), 1 / SIZE)


def proposed(make: Callable[[], Any]) -> Proposal:
    """What comes out of the checks, of one row that is asked for up to four tokens."""
    own: Any = SimpleNamespace(layers=(), propose=lambda num_draft_tokens, uniforms: make())
    return CheckedDrafter(own, "./mine.py:Mine").propose(4, torch.full((1, 4), 0.01))


def raise_(error: Exception) -> Any:
    raise error


def test_a_wrong_proposal() -> None:
    for make, words in [
        (lambda: [TOKENS], "'list' object has no attribute 'tokens'"),
        (lambda: Proposal(TOKENS.expand(1, 9)), "tokens of shape [1, 9], not [1, 4]"),
        (lambda: Proposal(TOKENS, EVEN[0]), "probabilities of shape [1, 20], not [1, 1, 20]"),
        (lambda: raise_(KeyError("lost")), "KeyError: 'lost'"),
    ]:  # fmt: skip
        with pytest.raises(
            RunError, match=rf"^draft=\./mine\.py:Mine: propose\(\): .*{re.escape(words)}"
        ):
            proposed(make)


def offer() -> Offer:
    """Of two rows of four tokens, all accepted."""
    target = torch.zeros(2, 5, SIZE)
    target[:, :, 0] = 1
    tokens = torch.zeros(2, 4, dtype=torch.long)
    return offer_of(target, tokens, None, torch.zeros(2, 4), torch.zeros(2, 5))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_accepted": torch.tensor([4])}, "num_accepted of shape [1], not [2]"),
        (None, "'NoneType' object has no attribute"),
    ],
)
def test_a_wrong_verdict(changes: dict[str, Tensor] | None, words: str) -> None:
    def rule(offer: Offer) -> Any:
        return None if changes is None else verify(offer)._replace(**changes)

    with pytest.raises(RunError, match=rf"^decoding.rule=Mine: verify\(\): .*{re.escape(words)}"):
        checked_rule(rule, "Mine")(offer())


# The table in the docs of targets whose layers are read.
PAGE = Path(__file__).parents[3] / "docs/engines.md"
ROW = re.compile(r"^\| (?P<types>`[^|]+`) \| [^|]+ \| (?P<answer>yes|no) \|$", re.MULTILINE)
TYPES = {
    name: row["answer"] == "yes"
    for row in ROW.finditer(PAGE.read_text(encoding="utf-8"))
    for name in re.findall(r"`(\w+)`", row["types"])
}
# What published configurations say, and a default configuration does not.
PUBLISHED: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": {"num_nextn_predict_layers": 1},
    "mellum": {"num_nextn_predict_layers": 1},
    "qwen3_5": {"text_config": {"mtp_num_hidden_layers": 1}},
    "qwen3_5_moe": {"text_config": {"mtp_num_hidden_layers": 1}},
    "qwen4_exp": {"text_config": {"mtp_num_hidden_layers": 1}},
}
DRAFT = SampledDraftSettings(name="mtp", method="mtp")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_come_from_the_targets_own_checkpoint(tmp_path: Path, family: str) -> None:
    target, layers = mtp_target(family, vocab_size=258)
    save_with_mtp(target, layers, tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    settings = ModelSettings(name="target", repository=str(tmp_path))
    placed = plan_pair(settings, DRAFT, PlacementSettings()).place(SMALL_DEMAND)
    pair = placed.load()
    assert isinstance(pair.head, MtpHead)
    loaded, expected = pair.head.layers.state_dict(), layers.layers.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in loaded.items())
    saved, of_target = target.state_dict(), pair.target.model.state_dict()
    assert all(tensor.equal(saved[name]) for name, tensor in of_target.items())
    assert pair.target.model.config.name_or_path == settings.repository

    sketch = placed.head.sketch(torch.float32)
    assert sketch.weight_bytes == sum(tensor.nbytes for tensor in expected.values())
    cache = DynamicCache(config=target.config)
    target(input_ids=torch.ones(1, 1, dtype=torch.long), **{cache_name(target): cache})
    kept: Any = cache.layers[-1]
    assert sum(sketch.cache_sizes(1, 0)) == (kept.keys.nbytes + kept.values.nbytes)
    # Half of the experts are read, and the target's output matrix once per token.
    held = sum(tensor.nbytes for name, tensor in expected.items() if ".experts." in name)
    unread = sum(tensor.nbytes for name, tensor in expected.items() if "correction_bias" in name)
    assert sketch.read_bytes() == sketch.weight_bytes - held // 2 - unread + 4 * 258 * 32
    assert not sketch.drafts_in_one_pass


def test_random_layers_need_no_files() -> None:
    target, _ = mtp_target("deepseek_v3", vocab_size=258)
    architecture = target.config.to_dict()
    settings = ModelSettings(name="random", repository="a/random", architecture=architecture)
    placed = plan_pair(settings, DRAFT, PlacementSettings(), weights="random").place(SMALL_DEMAND)
    first, second = (placed.load().head for _ in range(2))
    for name, tensor in first.state_dict().items():
        assert tensor.equal(second.state_dict()[name])
        assert (tensor.std() > 0.01) == (tensor.dim() > 1), name


def refusal(target: Checkpoint, *, weights: bool = False) -> str:
    with pytest.raises(SettingError, match="draft=mtp") as caught:
        read_mtp("mtp", target, weights=weights)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_targets_without_such_layers_are_refused() -> None:
    config = mtp_target("deepseek_v3")[0].config
    assert "GGUF" in refusal(as_checkpoint(config, gguf_file="a.gguf"))
    config.num_mtp_layers = 3
    assert "one is read" in refusal(as_checkpoint(config))
    several = CONFIG_MAPPING["glm4_moe_lite"](**{"num_nextn_predict_layers": 2})
    assert "has 2 such layers, and one is read" in refusal(as_checkpoint(several))
    config.num_mtp_layers = 0
    assert "has none" in refusal(as_checkpoint(config))


def test_a_checkpoint_that_was_saved_without_them_is_refused(tmp_path: Path) -> None:
    mtp_target("glm4_moe")[0].save_pretrained(tmp_path)
    target = read_checkpoint("model", ModelSettings(name="bare", repository=str(tmp_path)))
    assert "hold none" in refusal(target, weights=True)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "safetensors" in refusal(target, weights=True)


def test_the_page_has_the_table() -> None:
    assert len(TYPES) == 18


@pytest.mark.skipif(
    not hasattr(MtpModel, "forward_layer"), reason="an older transformers reads fewer"
)
@pytest.mark.parametrize("name", TYPES)
def test_a_target_is_taken_or_refused_as_the_page_says(name: str) -> None:
    if name not in CONFIG_MAPPING:
        pytest.skip("this transformers does not know the target")
    target = as_checkpoint(CONFIG_MAPPING[name](**PUBLISHED.get(name, {})))
    if TYPES[name]:
        assert read_mtp("mtp", target, weights=False).config.transformer.num_hidden_layers == 1
    else:
        refusal(target)
