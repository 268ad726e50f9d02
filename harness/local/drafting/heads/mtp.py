"""Multi-token prediction (MTP; DeepSeek-AI 2024, arXiv:2412.19437): an extra layer after the target's last one,
stored in the target's checkpoint.

Entry i of the layer pairs the target's last hidden state at token i with the embedding of token i + 1, and
predicts token i + 2. As in other engines, this one layer drafts all K tokens, in a chain like EAGLE's. Every published
target whose MTP layers transformers can read has exactly one.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import load_state_dict

from harness.config.errors import SettingError
from harness.config.settings import ModelSettings, require
from harness.local.drafting.heads.checkpoint import HeadCheckpoint, ready
from harness.local.drafting.heads.eagle import Eagle3
from harness.local.drafting.heads.head import (
    Head,
    HeadConfig,
    LayeredHead,
    sliding_windows,
)
from harness.local.drafting.heads.stored import fetch, reading
from harness.local.models.cache_names import CACHE
from harness.local.models.checkpoints import Checkpoint, stored_quantization, weight_map
from harness.local.models.sketch import (
    LayerCache,
    TensorSketch,
    bare_model,
    own_tensors,
    sketch_tensor,
)
from harness.local.models.tokenizers import vocabulary_size
from harness.local.runners.slots import SlotCache

# For targets whose MTP tensors transformers knows, but not the number of their MTP layers: the model type, and the
# field of the configuration that holds this number.
_NUMBER_OF_LAYERS = {
    "qwen3_next": "mtp_num_hidden_layers",
    "qwen3_5_text": "mtp_num_hidden_layers",
    "qwen3_5_moe_text": "mtp_num_hidden_layers",
    "glm4_moe_lite": "num_nextn_predict_layers",
}
# Files that list the names of a checkpoint's tensors, in the order in which they are looked for.
_FILES = ("model.safetensors.index.json", "model.safetensors")


class MtpHead(Eagle3):
    """transformers' multi-token-prediction layer, used as an EAGLE-3 head is: it drafts in the same way, with another
    layer. The embedding and the output matrix are the target's.

    In its configuration, `layers` is the target's last layer, and `transformer` is the result of
    the target configuration's `get_mtp_config()`.
    """

    name = "mtp"
    title = "MTP"
    config_type = HeadConfig

    def __init__(self, config: HeadConfig, model: MtpModel) -> None:
        # Only the constructor of `Head`, because the layer comes from `model`.
        super(LayeredHead, self).__init__(config, config.target_size)
        layer_config: Any = config.transformer
        self._model = [model]  # in a list, because it holds the target's matrices too
        self.layers = model.layers
        # The layer's output is normalised by the layer itself, or by a norm that all MTP layers share.
        self.shared_norm = model.shared_post_norm if model.use_shared_post_norm else nn.Identity()
        rotary: Any = type(model.rotary_emb)
        with torch.device("cpu"):
            self.rotary_emb = rotary(layer_config)  # the target's may be on another device
        self.windows = sliding_windows(layer_config)
        # The rotary embedding's additional argument, for models whose angles differ by layer.
        self._rotary_arguments: dict[str, Any] = {}
        if getattr(model, "has_per_layer_rope", False):
            self._rotary_arguments["layer_type"] = layer_config.layer_types[0]

    def predict(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.logits(states), states

    def join(self, features: Tensor) -> Tensor:
        """Return the features unchanged, because the layer normalises them itself."""
        return features

    def forward(self, embedded: Tensor, states: Tensor, cache: SlotCache) -> Tensor:
        """Run the layer over entries, at the slots where `cache` has placed them. Returns the entries' normalised
        states [B, n, width].

        Args:
            embedded: [B, n, width], the embedding of each entry's token.
            states: [B, n, width], the target's last state for each entry, or the state that the entry before it gave.
        """
        rotary = self.rotary_emb(states, cache.positions, **self._rotary_arguments)
        states = self.layers[0](
            embedded,
            states,
            position_embeddings=rotary,
            attention_mask=cache.causal_mask(self.windows[0], states.dtype),
            position_ids=cache.positions,
            **{CACHE: cache},
        )
        return self.shared_norm(states)

    def caches(self) -> list[LayerCache]:
        # Running one token through the layer shows how much the layer caches per token. The values do not
        # matter, so that the same tensor serves as the token's embedding and as the target's state.
        cache = SlotCache(1, 1)
        cache.place(torch.zeros(1, dtype=torch.long, device="meta"), 1)
        states = torch.zeros(1, 1, self.config.target_size, device="meta")
        self(states, states, cache)
        buffers = [buffer for layer in cache.buffers.values() for buffer in layer]
        numbers = sum(buffer.shape[1] * buffer.shape[3] for buffer in buffers)
        return [LayerCache(numbers, window=self.windows[0])]

    def sketches(self) -> list[TensorSketch]:
        [model] = self._model
        tensors = []
        # The embedding, the output matrix and the rotary embedding are the target's.
        for module_name, module in model.named_modules():
            if module_name.startswith(("layers", "shared_post_norm")):
                for name, tensor in own_tensors(module, module_name):
                    tensors.append(sketch_tensor(model, module, name, tensor, quantizable=False))
        return tensors


@dataclass(frozen=True, kw_only=True)
class MtpCheckpoint(HeadCheckpoint):
    """An MTP layer before its weights load.

    Attributes:
        target: the checkpoint of the model that the layer belongs to.
        files: one file, which lists the names of the target's tensors, and whose directory holds the weights. Empty for
            random weights.
    """

    target: Checkpoint

    def build(self) -> MtpHead:
        bare = bare_model(self.target, torch.float32)
        # Other implementations of experts read values, which tensors on the meta device do not have.
        bare.set_experts_implementation("batched_mm")
        with init_empty_weights(include_buffers=True):
            return MtpHead(self.config, MtpModel(bare, 1))

    def load(
        self, device: torch.device, dtype: torch.dtype, target: PreTrainedModel | None = None
    ) -> Head:
        """Load the layer as `HeadCheckpoint.load` does. Stored weights need `target`, the loaded model. Raises RunError
        if tensors are missing.
        """
        if not self.files:
            return super().load(device, dtype, target)
        assert target is not None
        # transformers reads settings for these layers from the target. They are set on a shallow copy of it.
        stand_in = copy.copy(target)
        stand_in.config = copy.copy(target.config)
        # transformers takes the weights' directory from the target's configuration. It finds the layers' tensors by
        # the name patterns that the target's class ignores, and these fit only one published depth (`layers.61`).
        stand_in.config.name_or_path = str(self.files[0].parent)
        stand_in._keys_to_ignore_on_load_unexpected = self.patterns
        with reading(self.target.settings, "draft", "a file"):
            model = MtpModel.from_pretrained(stand_in, device_map={"": device})
        return ready(MtpHead(self.config, model), device, target)

    @property
    def patterns(self) -> list[str]:
        """Regular expressions for the names of the layer's tensors: the layer after the target's last one, as in
        `model.layers.61`, and the patterns with `mtp` that the target's class has.
        """
        number = self.target.config.get_text_config(decoder=True).num_hidden_layers
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(self.target.config)]
        ignored = model_class._keys_to_ignore_on_load_unexpected or ()
        named = [pattern for pattern in ignored if "mtp" in pattern]
        return [rf"(^|\.)layers\.{number}\.", *named]


def read_mtp(draft: str, target: Checkpoint, *, weights: bool) -> MtpCheckpoint:
    """Return the checkpoint of a target's multi-token-prediction layer.

    Args:
        draft: the draft's name, for errors.
        weights: whether the stored weights are used. If not, nobody checks that the checkpoint holds such a layer.

    Raises:
        SettingError: the target has no such layer, or more than one, or a quantized one, or one that transformers
            cannot read.
        RunError: the weights cannot be fetched.
    """
    text_config = target.config.get_text_config(decoder=True)
    name_layers(text_config)
    size = vocabulary_size(text_config)
    # The layer drafts as an EAGLE head that reads only the output of the target's last layer.
    config = HeadConfig(
        layers=(text_config.num_hidden_layers,),
        target_size=text_config.hidden_size,
        vocabulary_size=size,
        draft_vocabulary_size=size,
        transformer=_layers_config(draft, target),
    )
    settings = ModelSettings(name=draft, repository=target.settings.repository)
    checkpoint = MtpCheckpoint(kind=MtpHead, settings=settings, config=config, target=target)
    if not weights:
        return checkpoint
    model = f"model={target.settings.name}"
    for name in _FILES:
        with reading(target.settings, "model", name):
            path = fetch(target.settings, name)
            if path is None:
                continue
            is_index = name == _FILES[0]
            names = list(weight_map(path) if is_index else load_state_dict(path, "meta"))
        patterns = checkpoint.patterns
        if any(re.search(pattern, name) for pattern in patterns for name in names):
            return replace(checkpoint, files=(path,))
        rule = f"needs multi-token-prediction layers, and the weights of {model} hold none"
        raise SettingError("draft", rule, draft)
    raise SettingError("draft", f"needs weights as safetensors, and {model} has none", draft)


def name_layers(text_config: Any) -> None:
    """Add to a target's configuration the attributes by which transformers finds MTP layers, for model types whose
    number of MTP layers it does not read. Changes the configuration in place.

    Qwen3-Next and its successors store one attention layer as `mtp.layers.0`, and next to it `mtp.fc`,
    `mtp.pre_fc_norm_embedding`, `mtp.pre_fc_norm_hidden` and `mtp.norm`, which
    transformers renames. Qwen3-Next's configuration does not mention this layer. GLM-4.7 Flash uses
    DeepSeek's layout.
    """
    setting = _NUMBER_OF_LAYERS.get(text_config.model_type)
    if setting is None:
        return
    number = 1 if text_config.model_type == "qwen3_next" else getattr(text_config, setting, 0)
    if number:
        text_config.num_mtp_layers = number
        text_config.mtp_layer_types = ["full_attention"] * number
        text_config.mtp_mlp_layer_types = ["sparse"] * number


def _layers_config(draft: str, target: Checkpoint) -> PreTrainedConfig:
    """Return the configuration of a target's MTP layer. Raises SettingError if the layer cannot be used."""
    text_config = target.config.get_text_config(decoder=True)
    model = f"model={target.settings.name}"
    kind = text_config.model_type
    if not getattr(text_config, "num_mtp_layers", None):
        lacks = "has none"
        if not hasattr(text_config, "num_mtp_layers"):
            lacks += f" that transformers {transformers.__version__} knows"
        rule = f"needs multi-token-prediction layers, and {model} ({kind}) {lacks}"
        raise SettingError("draft", rule, draft)
    rule = f"cannot be used: {model} has {text_config.num_mtp_layers} such layers, and one is read"
    require(text_config.num_mtp_layers == 1, "draft", rule, draft)
    is_gguf = target.settings.gguf_file is not None
    quantized = "GGUF" if is_gguf else stored_quantization(target.config)
    rule = f"needs weights that are not quantized, and those of {model} are ({quantized})"
    require(quantized is None, "draft", rule, draft)
    try:
        config: PreTrainedConfig = target.config.get_mtp_config()
    except ValueError as error:
        rule = f"cannot be used: transformers does not read such layers of {kind}"
        raise SettingError("draft", rule, draft) from error
    layer_types = set(getattr(config, "layer_types", None) or ())
    unknown = ", ".join(sorted(layer_types - {"full_attention", "sliding_attention"}))
    rule = f"cannot be used: the layers of {model} are of type {unknown}"
    require(not unknown, "draft", rule, draft)
    return config
