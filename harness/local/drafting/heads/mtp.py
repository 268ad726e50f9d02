"""Multi-token prediction (MTP; DeepSeek-AI 2024, arXiv:2412.19437): an additional layer after the target's last layer,
stored in the target's checkpoint.

The layer reads a sequence of entries. Entry i pairs the target's last hidden state at token i with the embedding of
token i + 1, and predicts token i + 2. As in other engines, the same layer drafts all K tokens, one after the other, as
EAGLE does. Every published target whose MTP layers transformers can read has exactly one such layer.
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

# Model types for which transformers can read the MTP layers' tensors, but does not read how many layers there are. The
# values name the field of the configuration that holds this number; None if the number is 1 and no field holds it.
_NUMBER_OF_LAYERS = {
    "qwen3_next": None,
    "qwen3_5_text": "mtp_num_hidden_layers",
    "qwen3_5_moe_text": "mtp_num_hidden_layers",
    "glm4_moe_lite": "num_nextn_predict_layers",
}
# Files that show the names of a checkpoint's tensors, in the order in which they are looked for.
_FILES = ("model.safetensors.index.json", "model.safetensors")


class MtpHead(Eagle3):
    """transformers' multi-token-prediction layer. It drafts as an EAGLE-3 head does, with its own layer in place of the
    head's layers. It uses the target's embedding and output matrix.

    In its configuration, `target_layers` names the output of the target's last layer, and `transformer` is the result
    of the target configuration's method `get_mtp_config()`.
    """

    name = "mtp"
    title = "MTP"
    config_type = HeadConfig

    def __init__(self, config: HeadConfig, model: MtpModel) -> None:
        # Call the constructor of `Head` only. The one of `LayeredHead` would make layers, but the layer is in `model`.
        super(LayeredHead, self).__init__(config, config.target_size)
        layer_config: Any = config.transformer
        # In a list, so that it is no submodule: it also holds the target's matrices, which are not the head's.
        self._model = [model]
        self.layers = model.layers
        # Depending on the model type, the layer normalises its output itself, or a norm outside the layer does.
        self.shared_norm = model.shared_post_norm if model.use_shared_post_norm else nn.Identity()
        rotary: Any = type(model.rotary_emb)
        with torch.device("cpu"):
            # A new one, because the target's rotary embedding may be on another device.
            self.rotary_emb = rotary(layer_config)
        self.windows = sliding_windows(layer_config)
        # An additional argument of the rotary embedding, for models whose rotary angles depend on the layer's type.
        self._rotary_arguments: dict[str, Any] = {}
        if getattr(model, "has_per_layer_rope", False):
            self._rotary_arguments["layer_type"] = layer_config.layer_types[0]

    def predict(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits, and the states unchanged: `forward` has normalised them, as the next entry needs them."""
        return self.logits(states), states

    def join(self, features: Tensor) -> Tensor:
        """Return the features unchanged, because the layer normalises them itself."""
        return features

    def forward(self, embedded: Tensor, states: Tensor, cache: SlotCache) -> Tensor:
        """Run the layer over entries, at the slots where `cache` has placed them. Returns the entries' normalised
        states [B, n, width].

        Args:
            embedded: [B, n, width], the embedding of each entry's token.
            states: [B, n, width], the target's last hidden state for each entry or, for a drafted token, the state of
                the entry before.
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
        # Running one token through the layer shows how many numbers the layer caches per token. The values do not
        # matter, so the same tensor serves as the token's embedding and as the target's state.
        cache = SlotCache(1, 1)
        cache.place(torch.zeros(1, dtype=torch.long, device="meta"), 1)
        states = torch.zeros(1, 1, self.config.target_size, device="meta")
        self(states, states, cache)
        buffers = [buffer for layer in cache.buffers.values() for buffer in layer]
        # Each buffer is [B, heads, slots, D].
        numbers = sum(buffer.shape[1] * buffer.shape[3] for buffer in buffers)
        return [LayerCache(numbers, window=self.windows[0])]

    def sketches(self) -> list[TensorSketch]:
        [model] = self._model
        # The other modules of `model` (embedding, output matrix, rotary embedding) belong to the target.
        return [
            sketch_tensor(model, module, name, tensor, quantizable=False)
            for module_name, module in model.named_modules()
            if module_name.startswith(("layers", "shared_post_norm"))
            for name, tensor in own_tensors(module, module_name)
        ]


@dataclass(frozen=True, kw_only=True)
class MtpCheckpoint(HeadCheckpoint):
    """An MTP layer whose weights are not loaded yet.

    Attributes:
        target: the checkpoint of the model that the layer belongs to.
        files: a single file, the index or the only weights file of the target. The weights are in its directory. Empty
            for random weights.
    """

    target: Checkpoint

    def build(self) -> MtpHead:
        bare = bare_model(self.target, torch.float32)
        # The other implementations of experts read values of tensors. On the meta device, tensors have no values.
        bare.set_experts_implementation("batched_mm")
        with init_empty_weights(include_buffers=True):
            return MtpHead(self.config, MtpModel(bare, 1))

    def load(
        self, device: torch.device, dtype: torch.dtype, target: PreTrainedModel | None = None
    ) -> Head:
        """Load the layer as `HeadCheckpoint.load` does. If weights are stored, `target`, the loaded model, must not be
        None, and the layer gets the dtype in the target's configuration.

        Raises:
            SettingError: a setting of the target, such as its revision, is wrong.
            RunError: a file cannot be read, or tensors are missing.
        """
        if not self.files:
            return super().load(device, dtype, target)
        assert target is not None
        # transformers reads two settings for the MTP layer from the target. They are set on a shallow copy, so that the
        # target itself does not change.
        stand_in = copy.copy(target)
        stand_in.config = copy.copy(target.config)
        # transformers reads the weights' directory from the target's configuration. It finds the layer's tensors by the
        # name patterns that the target's class ignores when it loads. Those are written for one published depth only
        # (`layers.61`), so `patterns` replaces them.
        stand_in.config.name_or_path = str(self.files[0].parent)
        stand_in._keys_to_ignore_on_load_unexpected = self.patterns
        with reading(self.target.settings, "model", "a file"):
            model = MtpModel.from_pretrained(stand_in, device_map={"": device})
        return ready(MtpHead(self.config, model), device, target)

    @property
    def patterns(self) -> list[str]:
        """Regular expressions that match the names of the layer's tensors.

        One matches the layer after the target's last layer, such as `model.layers.61`. The others are patterns of the
        target's class that contain `mtp`.
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
        weights: whether the stored weights are used. If not, it is not checked that the target's checkpoint contains
            the weights of such a layer.

    Raises:
        SettingError: the target has no such layer, or more than one; its weights are quantized, or are not stored as
            safetensors; or transformers cannot read the layer.
        RunError: the weights cannot be fetched or read.
    """
    text_config = target.config.get_text_config(decoder=True)
    add_layer_fields(text_config)
    size = vocabulary_size(text_config)
    # The layer drafts as an EAGLE-3 head would that reads only the output of the target's last layer.
    config = HeadConfig(
        target_layers=(text_config.num_hidden_layers,),
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
            tensors = list(weight_map(path) if is_index else load_state_dict(path, "meta"))
        patterns = checkpoint.patterns
        if any(re.search(pattern, tensor) for pattern in patterns for tensor in tensors):
            return replace(checkpoint, files=(path,))
        rule = f"needs multi-token-prediction layers, and the weights of {model} hold none"
        raise SettingError("draft", rule, draft)
    raise SettingError("draft", f"needs weights as safetensors, and {model} has none", draft)


def add_layer_fields(text_config: Any) -> None:
    """Add to a target's configuration the attributes from which transformers learns how many MTP layers it has.

    This changes the configuration in place, but only for the model types in `_NUMBER_OF_LAYERS`, and only if the target
    has MTP layers.

    Qwen3-Next and its successors store one attention layer as `mtp.layers.0`, and next to it the tensors of `mtp.fc`,
    `mtp.pre_fc_norm_embedding`, `mtp.pre_fc_norm_hidden` and `mtp.norm`. transformers renames all of these.
    Qwen3-Next's configuration does not mention this layer, so the number 1 is assumed. GLM-4.7 Flash stores its MTP
    layer as DeepSeek does.
    """
    if text_config.model_type not in _NUMBER_OF_LAYERS:
        return
    field = _NUMBER_OF_LAYERS[text_config.model_type]
    number = getattr(text_config, field, 0) if field else 1
    if number:
        text_config.num_mtp_layers = number
        text_config.mtp_layer_types = ["full_attention"] * number
        # Only models with experts read this.
        text_config.mtp_mlp_layer_types = ["sparse"] * number


def _layers_config(draft: str, target: Checkpoint) -> PreTrainedConfig:
    """Return the configuration of a target's MTP layer.

    Raises:
        SettingError: the target has no MTP layer that transformers knows, or several; its weights are quantized; or the
            layer is of a type that is not supported.
    """
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
