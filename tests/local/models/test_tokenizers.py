"""Vocabularies that agree, and the longest sequence a model takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from harness.config.errors import SettingError
from harness.config.settings import ModelSettings, PlacementSettings
from harness.local.drafting.translated import Translation, how_to_translate
from harness.local.models.tokenizers import load_tokenizer, max_context
from tiny_checkpoints import VOCABULARY_SIZE, as_checkpoint, load_pair, make_config, make_tokenizer

SaveModel = Callable[..., ModelSettings]


def check(
    target: PreTrainedTokenizerFast,
    draft: PreTrainedTokenizerFast,
    target_size: int = VOCABULARY_SIZE,
    draft_size: int = VOCABULARY_SIZE,
) -> Translation | None:
    return how_to_translate(
        as_checkpoint(make_config("llama", vocab_size=target_size)),
        as_checkpoint(make_config("llama", vocab_size=draft_size), "draft", name="7B"),
        target,
        draft,
    )


def test_another_vocabulary_is_translated_and_another_padding_is_not() -> None:
    for sizes in ((320, 320), (384, 320), (320, 384)):
        assert check(make_tokenizer(), make_tokenizer(), *sizes) is None
    for other in (
        make_tokenizer(extra_tokens=("<extra>",)),
        make_tokenizer(extra_tokens=("<b>", "<a>")),
    ):
        found = check(make_tokenizer(extra_tokens=("<a>", "<b>")), other)
        assert found is not None
        assert len(found.common) > 250


def test_draft_with_fewer_outputs_than_tokens() -> None:
    check(make_tokenizer(), make_tokenizer(), draft_size=258)
    with pytest.raises(
        SettingError, match=r"^draft=7B: has 257 outputs against 320 of model=13B, for 258 tokens$"
    ):
        check(make_tokenizer(), make_tokenizer(), draft_size=257)


def test_shared_vocabulary_size(save_model: SaveModel) -> None:
    target, draft = save_model("llama", vocab_size=384), save_model("gpt2", vocab_size=320)
    assert load_pair(target, draft, PlacementSettings()).vocabulary_size == 320
    assert load_pair(target, None, PlacementSettings()).vocabulary_size == 384
    other = save_model("gpt2", "other", tokenizer=make_tokenizer(extra_tokens=("<extra>",)))
    assert load_pair(target, other, PlacementSettings()).vocabulary_size == 384


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer"])
def test_declared_classes_load_as_transformers_would_load_them(
    save_model: SaveModel, model_type: str, name: str
) -> None:
    """Also where `AutoTokenizer`, which imports torch, is not asked."""
    settings = save_model("llama", tokenizer=make_tokenizer())
    changes = {"tokenizer_config": {"tokenizer_class": name}, "config": {"model_type": model_type}}
    for stem, change in changes.items():
        file = Path(settings.repository, f"{stem}.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    tokenizer = load_tokenizer(settings)
    same = AutoTokenizer.from_pretrained(settings.repository)
    assert type(tokenizer) is type(same)
    assert tokenizer("1 + 1 = 2, größer") == same("1 + 1 = 2, größer")


@pytest.mark.parametrize(
    ("model_type", "settings", "limit"),
    [
        ("llama", {"max_position_embeddings": 4096}, 4096),
        ("gpt2", {"n_positions": 1024}, 1024),
        ("gptj", {"n_positions": 2048}, 2048),
        ("opt", {"max_position_embeddings": 2048}, 2048),
        ("mistral", {"max_position_embeddings": 32768, "sliding_window": 4096}, 32768),
        ("bloom", {"seq_length": 2048}, None),
        ("mpt", {"max_seq_len": 2048}, None),
        ("mpt", {"max_seq_len": 2048, "attn_config": {"alibi": False}}, 2048),
        ("falcon", {"alibi": True}, None),
        ("falcon", {"alibi": False, "max_position_embeddings": 2048}, 2048),
    ],
)
def test_max_context(model_type: str, settings: dict[str, object], limit: int | None) -> None:
    assert max_context(AutoConfig.for_model(model_type, **settings)) == limit
