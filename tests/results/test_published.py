from __future__ import annotations

import pytest

from harness.experiments.tasks import load_task
from harness.results.published import FIGURES, MULTIPLICATION_ACCURACY, canonical_name, published_for


@pytest.mark.parametrize(
    ("name", "quantization", "expected"),
    [
        ("7B", "none", "7B"),
        ("7B_4GPUs_8bit", "8bit", "7B_8bit_4GPUs"),
        ("7B_8bit_4GPUs", "8bit", "7B_8bit_4GPUs"),
        ("7B_4GPUs", "8bit", "7B_8bit_4GPUs"),
        ("llama3.1_70B-bnb-4bit", "4bit", "llama3.1_70B-bnb-4bit"),
        ("./7B_8bit", "none", "./7B_8bit"),
        ("7B", None, "7B"),
    ],
)
def test_a_model_has_one_name(name: str, quantization: str | None, expected: str) -> None:
    assert canonical_name(name, quantization) == expected


def test_a_figure_is_found_under_every_name_of_its_pair() -> None:
    for figure in FIGURES:
        for model in figure.models:
            for draft in figure.drafts or (None,):
                assert figure in published_for({"model": model, "draft": draft})
    assert published_for({"model": "tiny", "draft": "tiny_draft"}) == []


def test_one_table_of_accuracies_serves_eval_and_report() -> None:
    assert load_task("multiplication").published is MULTIPLICATION_ACCURACY
    assert MULTIPLICATION_ACCURACY["13B"] == {"regular": 0.429, "speculative": 0.431}
