"""Every model preset composes, is what transformers knows under that name, and has the published size."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM

from harness.cli.conversion import from_config
from harness.config.settings import ModelSettings
from harness.local.drafting.heads.checkpoint import KINDS, read_head
from harness.local.models.checkpoints import Checkpoint

CONF = Path(__file__).parents[2] / "conf"
NAMES = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))

# These ship with the project or name no model, and have no published size.
OURS = {"tiny", "tiny_draft", "tiny_eagle3", "tiny_dflash", "tiny_medusa", "none"}

# Name -> parameters as the model cards and the safetensors indices on the hub count them, and context length. BLOOM's
# positions have no limit in its configuration.
PUBLISHED: dict[str, tuple[int, int | None]] = {
    "7B": (6_738_415_616, 2048),
    "13B": (13_015_864_320, 2048),
    "30B": (32_528_943_616, 2048),
    "65B": (65_285_660_672, 2048),
    "llama2_7B": (6_738_415_616, 4096),
    "llama2_13B": (13_015_864_320, 4096),
    "llama2_70B": (68_976_648_192, 4096),
    "llama3.1_8B": (8_030_261_248, 131_072),
    "llama3.1_8B-bnb-4bit": (8_030_261_248, 131_072),
    "llama3.1_70B": (70_553_706_496, 131_072),
    "llama3.1_70B-bnb-4bit": (70_553_706_496, 131_072),
    "llama3.2_1B": (1_235_814_400, 131_072),
    "llama_68m": (68_030_208, 2048),
    "tinyllama": (1_100_048_384, 2048),
    "gpt2": (124_439_808, 1024),
    "gpt2-xl": (1_557_611_200, 1024),
    "opt-1.3b": (1_315_758_080, 2048),
    "opt-6.7b": (6_658_473_984, 2048),
    "opt-13b": (12_853_473_280, 2048),
    "pythia-160m": (162_322_944, 2048),
    "pythia-410m": (405_334_016, 2048),
    "pythia-1b": (1_011_781_632, 2048),
    "pythia-1.4b": (1_414_647_808, 2048),
    "pythia-6.9b": (6_857_302_016, 2048),
    "pythia-12b": (11_846_072_320, 2048),
    "bloom-560m": (559_214_592, None),
    "bloom-1b1": (1_065_314_304, None),
    "bloom-1b7": (1_722_408_960, None),
    "bloom-3b": (3_002_557_440, None),
    "bloom-7b1": (7_069_016_064, None),
    "smollm2-135m": (134_515_008, 8192),
    "smollm2-360m": (361_821_120, 8192),
    "smollm2-1.7b": (1_711_376_384, 8192),
    "qwen3-4b": (4_022_468_096, 40_960),
    "qwen3-8b": (8_190_735_360, 40_960),
    # Of the 27,781,427,952 in its files these are the language model's; 460,730,096 are for images, 424,699,392 of MTP.
    "qwen3.6-27b": (26_895_998_464, 262_144),
    "qwen3.8-27b": (26_895_998_464, 262_144),
    # 81,324,862,720 with 1,650,471,424 of MTP.
    "qwen3-next-80b": (79_674_391_296, 262_144),
    # 110,468,824,832 with 2,375,059,456 of MTP, its copies of the embedding and the output matrix (1,241,513,984), and
    # 5,888 corrections of the router, which are buffers here.
    "glm-4.5-air": (106_852_245_504, 131_072),
    "gpt-oss-120b": (116_829_156_672, 131_072),
    "gpt-oss-20b": (20_914_757_184, 131_072),
    # Model cards give 30.7, 25.2 and, with 0.5 for images and sound, 8.0 billion.
    "gemma4-31b": (30_697_345_280, 262_144),
    "gemma4-26b-a4b": (25_233_141_760, 262_144),
    "gemma4-e4b": (7_463_013_376, 131_072),
    # The report gives 744 billion.
    "glm-5": (743_911_199_232, 202_752),
    # 109 billion with its part for images.
    "llama4-scout": (107_769_861_120, 10_485_760),
    # The model card gives 284 billion.
    "deepseek-v4-flash": (284_332_230_231, 1_048_576),
    "minimax-m2": (228_689_748_992, 196_608),
    "llama3.1_8B-instruct": (8_030_261_248, 131_072),
    "baichuan-7b": (7_000_559_616, 4096),
    "baichuan-13b": (13_264_901_120, 4096),
}

# Name -> target, kind, and bytes of its file (exact but for the header) or billions of parameters (rounded) as the hub
# has them; None where neither is known to us.
HEADS: dict[str, tuple[str, str, float | None]] = {
    "llama3.1_8B-eagle3": ("llama3.1_8B-instruct", "eagle3", 1),
    "qwen3-8b-eagle3": ("qwen3-8b", "eagle3", 2_044_116_968),
    "qwen3-4b-dflash": ("qwen3-4b", "dflash", None),
    "qwen3-8b-dflash": ("qwen3-8b", "dflash", None),
    "qwen3-8b-hspec-dflash": ("qwen3-8b", "dflash", None),
    "qwen3-8b-hspec-dspark": ("qwen3-8b", "dspark", None),
    "qwen3-4b-deepspec-eagle3": ("qwen3-4b", "eagle3", None),
    "qwen3-4b-deepspec-dflash": ("qwen3-4b", "dflash", 1),
    "qwen3-4b-deepspec-dspark": ("qwen3-4b", "dspark", 1),
}


# Keys that models of a type read and its configuration does not declare.
UNDECLARED = {
    "glm4_moe": {"head_dim"},
    "gemma4_text": {"global_head_dim", "num_global_key_value_heads"},
}


@functools.cache
def preset(name: str) -> ModelSettings:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(overrides=[f"+model={name}"])
    container = OmegaConf.to_container(config.model)
    assert isinstance(container, dict)
    return from_config(ModelSettings, {str(key): value for key, value in container.items()})


def architecture_of(name: str) -> Mapping[str, Any]:
    architecture = preset(name).architecture
    assert architecture is not None
    return architecture


def test_every_preset_has_a_published_size() -> None:
    # transformers 5.23 cannot build these.
    assistants = {name for name in NAMES if name.endswith("-assistant")}
    assert set(NAMES) - OURS - assistants == set(PUBLISHED) | set(HEADS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_architecture_is_what_transformers_knows(name: str) -> None:
    architecture = architecture_of(name)
    config = AutoConfig.for_model(**architecture)
    read_by_layers = UNDECLARED.get(config.model_type, set())
    # transformers would take other keys without a word, and no model reads them. `draft=mtp` reads the second.
    known = {"model_type", "mtp_num_hidden_layers"} | read_by_layers | set(config.attribute_map)
    fields = {field.name for field in dataclasses.fields(config)}
    assert not set(architecture) - fields - known
    # Layers of Gemma 4 differ, and transformers gives a value for all of them only if it is allowed to.
    config.allow_global_per_layer_attribute_access = True
    for key in architecture.keys() - read_by_layers:
        value = architecture[key]
        assert getattr(config, key) == (getattr(torch, value) if key == "dtype" else value), key


@pytest.mark.parametrize("name", HEADS)
def test_head_is_of_its_kind_and_size(name: str) -> None:
    model, kind, published = HEADS[name]
    target = Checkpoint("model", preset(model), AutoConfig.for_model(**architecture_of(model)))
    head = read_head(preset(name), target, weights=False)
    assert head.kind is KINDS[kind]
    sketch = head.sketch(torch.bfloat16)
    if published is not None and published > 1000:
        # Which of the target's tokens the head knows is stored as well, a byte for each.
        expected = sketch.weight_bytes + head.config.vocabulary_size
        assert 0 < published - expected < 5000
    elif published is not None:
        rounding = 0.5 if published == round(published) else 0.01 * published
        assert abs(sketch.num_parameters / 1e9 - published) < rounding


@pytest.mark.parametrize("name", PUBLISHED)
def test_model_has_the_published_size_and_context(name: str) -> None:
    config = AutoConfig.for_model(**architecture_of(name))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    published, context = PUBLISHED[name]
    assert parameters == published
    assert model.dtype == config.dtype
    assert getattr(config, "max_position_embeddings", None) == context
