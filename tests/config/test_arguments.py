"""Keywords from Python as overrides, which Hydra must read as the values that were given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from harness.commands.latency.record import LatencySettings
from harness.menu.arguments import from_keywords
from harness.menu.conversion import setting_names

KNOWN = setting_names(LatencySettings)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (4, 4),
        (np.int64(4), 4),
        (np.float32(0.5), 0.5),
        (True, True),
        (np.bool_(False), False),
        (None, None),
        ([1, 2], [1, 2]),
        (range(3), [0, 1, 2]),
        (("a, b", "it's"), ["a, b", "it's"]),
        ({"model.layers.0": 1, "lm_head": "cpu"}, {"model.layers.0": 1, "lm_head": "cpu"}),
        (Path("a b") / "c,d", "a b/c,d"),
        (Path("model"), "./model"),
    ],
    ids=repr,
)
def test_a_value_arrives_as_it_was_given(given: Any, expected: Any) -> None:
    (argument,) = from_keywords({"placement": {"device_map": given}}, KNOWN)
    override = OverridesParser.create().parse_override(argument)
    assert (override.key_or_group, override.value()) == ("placement.device_map", expected)


def test_a_mapping_is_a_group_where_the_command_has_one() -> None:
    keywords = {
        "decoding": {"top_p": 0.9, "top_k": 3},
        "hydra": {"run": {"dir": "x"}},
        "draft": None,
    }
    assert from_keywords(keywords, KNOWN) == [
        "decoding.top_p=0.9",
        "decoding.top_k=3",
        "hydra.run.dir=x",
        "draft=none",
    ]
