"""The parts of tiny random-weight checkpoints, and how much memory one takes."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from architectures import random_model
from harness.config.demand import Demand
from harness.config.settings import DraftSettings, Dtype, ModelSettings, PlacementSettings
from harness.local.drafting.method import ModelDraftSettings, Pair
from harness.local.engine.pair import plan_pair
from harness.local.models.checkpoints import Checkpoint
from harness.local.models.loading import LoadedModel
from shipped_copies import SHIPPED

VOCABULARY_SIZE = 320
_GPU = torch.device("cuda", 0)

# Enough width that scales and tables of quantized weights are told apart from the weights themselves.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "gpt2": {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "opt": {
        "hidden_size": 128,
        "word_embed_proj_dim": 128,
        "ffn_dim": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    },
}


def make_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    tokens: dict[str, Any] = {"vocab_size": VOCABULARY_SIZE, "bos_token_id": 0, "eos_token_id": 1}
    tokens["pad_token_id"] = None
    fields = ARCHITECTURES.get(model_type, {}) | tokens | overrides
    return AutoConfig.for_model(model_type, **fields)


def make_tokenizer(
    extra_tokens: tuple[str, ...] = (), chat_template: str | None = None
) -> PreTrainedTokenizerFast:
    """Bytes, two special tokens, and whatever is added; encodes any text."""
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.add_tokens(list(extra_tokens))
    fast.chat_template = chat_template
    return fast


def save_random(
    directory: Path,
    model_type: str = "llama",
    name: str | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
    settings: dict[str, Any] | None = None,
    **overrides: Any,
) -> ModelSettings:
    """Save a random-weight model with its tokenizer below a directory, and return the settings that load it."""
    path = directory / (name or model_type)
    torch.manual_seed(0)
    config = make_config(model_type, **overrides)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype or torch.float32)
    model.save_pretrained(path)
    (tokenizer or make_tokenizer()).save_pretrained(path)
    return ModelSettings(name=str(path), repository=str(path), **(settings or {}))


def save_talkative_pair(directory: Path, num_bytes: int) -> list[str]:
    """A target and a draft that often disagrees, for both of which only so many bytes are likely, and three prompts.

    Returns:
        The settings that name them.
    """
    for seed, name in enumerate(("target", "draft")):
        model = random_model("llama", seed=seed, vocab_size=258, num_hidden_layers=2)
        with torch.no_grad():
            torch.manual_seed(2)  # the same few bytes in both
            model.lm_head.weight[torch.randperm(258)[num_bytes:]] = 0.0
            model.lm_head.weight *= 5
        model.save_pretrained(directory / name)
        make_tokenizer().save_pretrained(directory / name)
    (directory / "prompts.txt").write_text("once upon a time\n2 + 2 =\nthe end\n")
    pair = [f"model={directory}/target", f"draft={directory}/draft"]
    return [*pair, f"prompts={directory}/prompts.txt"]


def as_checkpoint(config: PreTrainedConfig, role: str = "model", **settings: Any) -> Checkpoint:
    """A checkpoint that exists as a configuration only."""
    asked = {"name": "13B", "repository": "nobody/13B"} | settings
    return Checkpoint(role, ModelSettings(**asked), config)


def held_bytes(model: torch.nn.Module) -> int:
    """Bytes of every storage that the model keeps alive, quantized weights' scales and tables included."""
    storages: dict[int, int] = {}

    def count(tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()

    for tensor in [*model.parameters(), *model.buffers()]:
        count(tensor.data)
        count(getattr(tensor, "SCB", None))
        state = getattr(tensor, "quant_state", None)
        for part in (state, getattr(state, "state2", None)):
            for name in ("absmax", "code", "offset"):
                count(getattr(part, name, None))
    for module in model.modules():
        count(getattr(getattr(module, "state", None), "SCB", None))
    return sum(storages.values())


# One row of a prompt and a few new tokens.
SMALL_DEMAND = Demand(
    batch_size=1, prompt_tokens=16, new_tokens=16, num_draft_tokens=4, runner="eager"
)


def load_pair(
    target: ModelSettings,
    draft: ModelSettings | DraftSettings | None,
    placement: PlacementSettings,
    dtype: Dtype = "auto",
) -> Pair:
    """Plan, place and load in one step."""
    planned = plan_pair(target, draft and as_draft(draft), placement, dtype)
    return planned.place(SMALL_DEMAND).load()


def as_draft(model: ModelSettings | DraftSettings) -> Any:
    """The settings of a draft that is this model; those of any other draft as they are."""
    return model if isinstance(model, DraftSettings) else ModelDraftSettings(**vars(model))


def load(model: ModelSettings, draft: ModelSettings | DraftSettings | None = None) -> Pair:
    """A pair in float32."""
    return load_pair(model, draft, PlacementSettings(), "float32")


def on_gpu(pair: Pair) -> Pair:
    """A copy of the pair on a GPU, or a pretended one."""
    # In one piece: a head refers to the target's embedding.
    copied = copy.deepcopy(pair)
    draft = None if copied.draft is None else _moved(copied.draft)
    head = None if copied.head is None else copied.head.to(_GPU)
    return dataclasses.replace(copied, target=_moved(copied.target), draft=draft, head=head)


def _moved(loaded: LoadedModel) -> LoadedModel:
    model = loaded.model.to(_GPU)
    return dataclasses.replace(loaded, model=model, devices=[_GPU], input_device=_GPU)


def shipped(*names: str) -> list[ModelSettings]:
    """The settings of models that ship with the project."""
    return [ModelSettings(name=name, repository=str(SHIPPED / name)) for name in names]


def pair_of(target: PreTrainedModel, draft: PreTrainedModel) -> Pair:
    """Both models as a pair that was loaded, of the names `model` and `draft`, without a tokenizer."""
    cpu = torch.device("cpu")
    loaded = []
    for name, model in (("model", target), ("draft", draft)):
        settings = ModelSettings(name=name, repository=name)
        loaded.append(LoadedModel(model, settings, None, model.dtype, [cpu], cpu))
    draft_settings = as_draft(loaded[1].settings)
    return Pair(*loaded, tokenizer=None, draft_settings=draft_settings)
