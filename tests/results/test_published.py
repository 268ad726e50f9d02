from harness.config.model_names import canonical_name
from harness.measuring.rows import LatencyRow
from harness.results.published import multiplication_accuracy, published_figures, published_for


def test_a_model_has_one_name() -> None:
    for name, quantization, expected in [
        ("7B", "none", "7B"),
        ("7B_4GPUs_8bit", "8bit", "7B_8bit_4GPUs"),
        ("7B_8bit_4GPUs", "8bit", "7B_8bit_4GPUs"),
        ("7B_4GPUs", "8bit", "7B_8bit_4GPUs"),
        ("llama3.1_70B-bnb-4bit", "4bit", "llama3.1_70B-bnb-4bit"),
        ("./7B_8bit", "none", "./7B_8bit"),
        ("7B", None, "7B"),
    ]:
        assert canonical_name(name, quantization) == expected


def test_a_figure_is_found_under_every_name_of_its_pair() -> None:
    assert len(published_figures()) == 82
    for figure in (figure for figure in published_figures() if not figure.accuracy):
        protocol = {"prompts": figure.prompts, "temperature": figure.temperature}
        for model in figure.models:
            for draft in figure.drafts or (None,):
                assert figure in published_for(LatencyRow(model=model, draft=draft, **protocol))
    assert published_for(LatencyRow(model="tiny", draft="tiny_draft")) == []


def test_a_figure_is_of_its_model_prompts_and_temperature() -> None:
    pair = {"model": "qwen3-8b", "draft": "qwen3-8b-dflash"}
    (figure,) = published_for(LatencyRow(**pair, prompts="math500_boxed", temperature=0.0))
    assert (figure.speedup_text, figure.mean_acceptance_length) == ("6.17×", 7.87)
    assert figure.prompts_text == "math500_boxed, T = 0"
    (hotter,) = published_for(LatencyRow(**pair, prompts="math500_boxed", temperature=1.0))
    assert hotter.speedup_text == "5.02×"
    assert published_for(LatencyRow(**pair, prompts="math500_boxed", temperature=0.5)) == []
    assert published_for(LatencyRow(**pair, prompts="math500", temperature=0.0)) == []
    assert multiplication_accuracy("13B") == {"regular": 0.429, "speculative": 0.431}
    assert multiplication_accuracy("65B") == {}
