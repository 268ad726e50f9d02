"""Where layers go, on sketches made by hand and pretended GPUs: no model is needed."""

import dataclasses
from typing import Any

import pytest
import torch

from harness.config.demand import Demand
from harness.config.errors import RunError
from harness.local.models.fit import PlacementProblem, fit, fit_or_explain
from harness.local.models.fit import remedies as found_remedies
from harness.local.models.sketch import TensorSketch
from sketches import GB, case, draft, fits, gpus_of, machine, sketch
from wording import mentions


@pytest.fixture(autouse=True)
def a_short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """For numbers of GPUs that would be enough."""
    monkeypatch.setattr("harness.local.models.fit._MOST_GPUS", 8)


def refused(asked: PlacementProblem) -> list[str]:
    with pytest.raises(RunError) as raised:
        fit_or_explain(asked)
    return str(raised.value).splitlines()


@pytest.mark.parametrize("gpus", [1, 3, 8])
@pytest.mark.parametrize("quantization", ["none", "4bit"])
@pytest.mark.parametrize("strategy", ["auto", "balanced"])
def test_no_device_gets_more_than_it_has(gpus: int, quantization: str, strategy: str) -> None:
    model = sketch(40, 0.6, settings={"quantization": quantization})
    size = model.weight_bytes / GB
    verdicts = []
    # From hopeless through tight to roomy.
    for share in (0.9, 1.02, 1.1, 1.3, 2):
        free = machine(*[size * share / gpus] * gpus)
        asked = case(model, free=free, reserve_gb=0, strategy=strategy)
        verdicts.append(fits(asked))
        if fits(asked):
            (one,) = fit(asked)
            assert sum(one.bytes_per_device.values()) == model.weight_bytes
            assert all(one.taken(gpu) <= asked.free[gpu] for gpu in range(gpus))
    assert verdicts[0] is False
    assert verdicts[-2:] == [True, True]
    assert verdicts == sorted(verdicts)


def test_a_head_away_from_its_target_holds_copies_of_matrices() -> None:
    target, head = sketch(20), draft(1, copied_tensors=(TensorSketch(GB),))
    together = fit(case(target, head, free=machine(30, 30)))
    assert [gpus_of(one) for one in together] == [["cuda:0"], ["cuda:0"]]
    apart = fit(case(target, head, free=machine(15, 15)))
    assert len(gpus_of(apart[0])) == 2
    held = [sum(placed[1].bytes_per_device.values()) for placed in (together, apart)]
    assert held[1] == held[0] + 2 * GB
    assert fits(case(target, draft(1), free=machine(13.5, 13.5)))
    assert not fits(case(target, head, free=machine(13.5, 13.5)))


def test_auto_takes_the_fewest_gpus_that_hold_the_model_and_balanced_all_in_order() -> None:
    model = sketch(10)  # 10.2 GB
    assert gpus_of(fit(case(model, free=machine(*[13] * 8)))[0]) == ["cuda:0"]
    (two,) = fit(case(model, free=machine(*[12] * 8)))
    assert gpus_of(two) == ["cuda:0", "cuda:1"]
    # The GPUs with the most room.
    assert gpus_of(fit(case(model, free=machine(4, 8, 4, 8)))[0]) == ["cuda:1", "cuda:3"]
    (one,) = fit(case(sketch(40, 0.6), free=machine(*[24] * 4), strategy="balanced"))
    assert gpus_of(one) == [f"cuda:{n}" for n in range(4)]
    assert max(one.bytes_per_device.values()) < 1.6 * min(one.bytes_per_device.values())
    assert list(one.device_map.values()) == sorted(one.device_map.values(), key=str)
    assert len(one.device_map) == 42, "blocks are never divided"


def test_limits_on_gpus() -> None:
    model, own = sketch(20), sketch(20, settings={"gpus": 2})
    (spread,) = fit(case(model, free=machine(*[24] * 4), strategy="balanced", gpus=2))
    assert gpus_of(spread) == ["cuda:0", "cuda:1"]
    assert gpus_of(fit(case(own, free=machine(1, 24, 24, 1)))[0]) == ["cuda:1", "cuda:2"]


def test_models_without_blocks_are_not_split_and_without_a_gpu_everything_is_the_cpus() -> None:
    whole: Any = sketch()
    whole.model._no_split_modules = None
    assert not fits(case(whole, free=machine(11, 11)))
    assert fit(case(whole, free=machine(11, 13)))[0].device_map == {"": 1}
    for strategy in ("auto", "balanced", "cpu"):
        assert fit(case(sketch(), free=machine(), strategy=strategy))[0].device_map == {"": "cpu"}
    assert fit(case(sketch(), free=machine(24), strategy="cpu"))[0].device_map == {"": "cpu"}


def test_a_target_makes_way_for_a_draft_that_stays_whole() -> None:
    # Spread evenly it would leave 8.9 GB on each.
    for strategy in ("auto", "balanced"):
        target, large = fit(case(sketch(26), draft(14), free=machine(24, 24), strategy=strategy))
        assert large.device_map == {"": 1}
        assert gpus_of(target) == ["cuda:0", "cuda:1"]
        assert all(target.taken(gpu) + large.taken(gpu) <= 22 * GB for gpu in (0, 1))


def test_the_reserve_comes_on_top_of_the_caches() -> None:
    # 10.2 GB of weights, and 2.048 GB of cache.
    demand = Demand(
        batch_size=10, prompt_tokens=1000, new_tokens=1024, num_draft_tokens=0, runner="eager"
    )
    model = sketch(10, cache=5000)
    (roomy,) = fit(case(model, free=machine(14.3), demand=demand))
    assert roomy.cache_per_device == {"cuda:0": 10 * 2024 * 10 * 5000 * 2}
    assert not fits(case(model, free=machine(14.1), demand=demand))
    assert fit(case(model, free=machine(14.1), demand=demand, reserve_gb=1.8))
    # It stays free on each GPU that holds anything, and is not needed in main memory.
    (two,) = fit(case(model, free=machine(14.1, 14.1), demand=demand))
    assert all(two.taken(gpu) <= 12.1 * GB for gpu in (0, 1))
    assert fit(case(model, free=machine(cpu_gb=12.3), demand=demand))


def test_what_reading_the_prompts_takes_is_kept_free() -> None:
    """The reserve is for it; where that is too small, more is kept free."""
    demand = Demand(
        batch_size=64, prompt_tokens=1000, new_tokens=10, num_draft_tokens=0, runner="eager"
    )
    model = sketch(10, vocabulary_size=100_000, pass_numbers=40_000)
    # 5.12 GB for a layer, and 0.04 GB for logits in float16 and float32; 10.2 GB of weights.
    asked = case(model, free=machine(15.4), demand=demand)
    assert asked.reserve_bytes == 64 * 1000 * 40_000 * 2 + 64 * 100_000 * 6
    assert fits(asked)
    _, advice = refused(dataclasses.replace(asked, free=machine(15.3)))
    assert "batch_size=63" in advice
    alone = dataclasses.replace(asked, demand=dataclasses.replace(demand, batch_size=1))
    assert alone.reserve_bytes == 2 * GB
    assert fit(dataclasses.replace(asked, free=machine()))[0].device_map == {"": "cpu"}


def test_tokens_that_a_runner_holds() -> None:
    demand = Demand(
        batch_size=2, prompt_tokens=100, new_tokens=60, num_draft_tokens=4, runner="auto"
    )
    eager = dataclasses.replace(demand, runner="eager")
    assert eager.runner_tokens == 164
    # 165 slots in whole buckets, and the prompt's own cache.
    assert demand.runner_tokens == 256 + 100
    shorter = dataclasses.replace(demand, new_tokens=20)
    assert shorter.runner_tokens == 128 + 100
    # A head writes again what was decided, and what it drafts.
    assert (demand.head_tokens(0), demand.head_tokens(100)) == (256, 384)
    assert dataclasses.replace(demand, new_tokens=148).head_tokens(0) == 384
    asked = case(sketch(cache=10), free=machine(40), demand=demand)
    assert fit(asked)[0].cache_per_device == {"cuda:0": 2 * 356 * 10 * 10 * 2}


def test_what_does_not_fit_says_what_would_and_force_places_it() -> None:
    asked = case(sketch(26), free=machine(16))
    first, second = refused(asked)
    assert mentions(first, "model=13B does not fit", "26.2 GB", "14.0 GB", "placement.reserve_gb")
    smaller = ["model=13B_8bit (13.2 GB)", "model=13B_4bit (6.91 GB)"]
    assert mentions(second, *smaller, "model=13B_2GPUs (2 GPUs with as much free)", "force=true")
    asked = case(sketch(5, 5), draft(2, layer_gb=7), free=machine(16, 8))
    assert "force=true" in refused(asked)[1]
    found = fit_or_explain(asked, force=True)
    sizes = [sum(one.bytes_per_device.values()) for one in found]
    assert sizes == [one.weight_bytes for one in asked.models]


def remedies(asked: PlacementProblem) -> list[str]:
    return list(map(str, found_remedies(asked)))


def test_remedies_are_only_those_that_help() -> None:
    text = " ".join(refused(case(sketch(80, 1.6), free=machine(24, 24, cpu_gb=16))))
    assert mentions(text, "128.3 GB", "22.0 GB + 22.0 GB")
    assert "model=13B_4bit (33." in text
    assert "8bit" not in text
    # 6 times 22 GB would be enough, but not for layers of 1.6 GB.
    assert "model=13B_7GPUs (7 GPUs with as much free)" in text


def test_unused_gpus_are_a_remedy_but_not_on_the_cpu() -> None:
    spread = "model=13B_2GPUs"
    assert spread in remedies(case(sketch(26), free=machine(24, 24), gpus=1))
    assert spread in remedies(case(sketch(26, settings={"gpus": 1}), free=machine(24, 24)))
    # The number of a draft is no reason to use further GPUs.
    assert spread in remedies(
        case(sketch(26), draft(1, settings={"gpus": 1}), free=machine(24, 24), gpus=1)
    )
    first, second = refused(case(sketch(14, dtype=torch.float32), free=machine(cpu_gb=13)))
    assert mentions(first, "14.2 GB", "13.0 GB of main memory")
    assert "GPU" not in second


def test_what_is_needed_where_no_setting_helps() -> None:
    in_4_bits = {"settings": {"quantization": "4bit"}, "cache": 5000}
    asked = case(sketch(14, **in_4_bits), free=machine(cpu_gb=3))
    assert "the weights alone do not fit: a smaller model" in refused(asked)[1]
    asked = case(sketch(1, **in_4_bits), free=machine(1.9))
    assert "the weights fit only without the reserve on each GPU" in refused(asked)[1]
    demand = Demand(1, prompt_tokens=9000, new_tokens=9, num_draft_tokens=0, runner="static")
    first, second = refused(case(sketch(14, **in_4_bits), free=machine(cpu_gb=5), demand=demand))
    assert "does not fit in harness's own decoding loop: " in first
    assert "the weights alone fit: shorter prompts" in second
    demand = dataclasses.replace(demand, runner="eager")
    first, _ = refused(case(sketch(14, **in_4_bits), free=machine(cpu_gb=3), demand=demand))
    assert "does not fit in harness's own decoding loop: " in first


def test_remedies_are_the_pairs_and_a_path_takes_no_suffix() -> None:
    found = remedies(case(sketch(26, settings={"name": "owner/13B"}), free=machine(16)))
    assert found[0] == "model.quantization=8bit (13.2 GB)"
    assert found[-1] == "model.gpus=2 (2 GPUs with as much free)"
    # In 8 bits the model would fit alone, but not with its draft.
    found = remedies(case(sketch(6, 4.5), draft(3, layer_gb=4.5), free=machine(16, cpu_gb=1)))
    assert found == ["model=13B_4bit draft=7B_4bit (12.2 GB)"]
    # As its own draft the model is refused.
    smaller = {"name": "13B_8bit", "repository": "x/13B", "quantization": "8bit"}
    found = remedies(case(sketch(12), draft(12, settings=smaller), free=machine(16)))
    assert found[0] == "model=13B_4bit (3.30 GB)"
