"""The table in docs/drafting.md of targets whose multi-token-prediction layers are read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from transformers.modeling_layers import MtpModel

from harness.config.errors import SettingError
from harness.local.drafting.heads.mtp import read_mtp
from tiny_checkpoints import as_checkpoint

PAGE = Path(__file__).parents[3] / "docs/drafting.md"
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
        return
    with pytest.raises(SettingError, match="draft=mtp"):
        read_mtp("mtp", target, weights=False)
