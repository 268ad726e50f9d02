"""Models with random weights: a checkpoint's architecture and quantization, without its weights.

Times do not depend on the weights' values, so a pair can be measured before it is downloaded.
Apart from the numbers, loading is the same: transformers gets a state dict whose tensors are made,
each on its device, when it reads them. So the same code quantizes them, one at a time, and they are
never all in memory at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from harness.config.errors import SettingError
from harness.config.run import WeightsSource
from harness.config.settings import ModelSettings
from harness.local.models.checkpoints import Checkpoint, read_checkpoint, stored_quantization
from harness.local.models.sketch import DeviceMap, bare_model, owning_module
from harness.local.models.tokenizers import check_vocabularies, vocabulary_size

# The standard deviation of random weights, with which most architectures start training.
_STANDARD_DEVIATION = 0.02


def checkpoint_for(role: str, settings: ModelSettings, weights: WeightsSource | None) -> Checkpoint:
    """Read the checkpoint of a model for a run with these weights.

    With random weights a preset's own architecture or a configuration is enough.

    Args:
        weights: the run's `weights`; None for a pair that is only planned, which needs none.

    Raises SettingError or RunError as `read_checkpoint` does, and SettingError for formats that random numbers cannot
    have.
    """
    if weights != "random":
        return read_checkpoint(role, settings, needs_weights=weights is not None)
    if settings.gguf_file is not None:
        rule = f"cannot be random for {role}={settings.name}: its format is GGUF"
        raise SettingError("weights", rule, "random")
    checkpoint = read_checkpoint(role, settings, needs_weights=False)
    stored = stored_quantization(checkpoint.config)
    if stored is not None:
        rule = f"cannot be random for {role}={settings.name}"
        reason = f"its weights are quantized with {stored}"
        raise SettingError("weights", f"{rule}: {reason}", "random")
    return dataclasses.replace(checkpoint, random=True)


def random_tokenizer(
    target: Checkpoint, draft: Checkpoint | None = None
) -> PreTrainedTokenizerBase:
    """Return a tokenizer for models with random weights, whose text nobody reads: it has a token for each byte, and a
    name such as `<300>` for every other id.

    Raises SettingError if the models' vocabularies differ by more than a family's padding.
    """
    size = vocabulary_size(target.config)
    if draft is not None:
        check_vocabularies(target, draft)
        size = min(size, vocabulary_size(draft.config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *(f"<{number}>" for number in range(len(alphabet), size))]
    vocabulary = {name: number for number, name in enumerate(names[:size])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def random_state(
    checkpoint: Checkpoint, device_map: DeviceMap, dtype: torch.dtype
) -> tuple[type[PreTrainedModel], dict[str, RandomTensor]]:
    """Return the class of a model, and a reproducible state dict for its `from_pretrained`."""
    bare = bare_model(checkpoint, dtype)
    repository = checkpoint.settings.repository
    tensors = {}
    for name, tensor in bare.named_parameters():
        device = device_map[owning_module(name, device_map)]
        tensors[name] = RandomTensor(f"{repository} {name}", tensor.shape, tensor.dtype, device)
    return type(bare), tensors


@dataclasses.dataclass(frozen=True)
class RandomTensor:
    """A tensor that is made when it is indexed, as a tensor in a safetensors file is read then.

    Its numbers follow from its name alone.

    Attributes:
        name: the seed of its numbers. Ends with the tensor's name in the model.
        device: a GPU's index, or `cpu`.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: int | str

    def get_shape(self) -> list[int]:
        """Return the shape, as safetensors' slices do."""
        return list(self.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        device = torch.device("cpu")
        if isinstance(self.device, int):
            device = torch.device("cuda", self.device)
        whole = torch.empty(self.shape, dtype=self.dtype, device=device)
        if len(self.shape) < 2:
            # Weights of 1 and biases of 0 make norms neutral, so that activations stay finite through any number of
            # layers.
            whole.fill_(0.0 if self.name.endswith("bias") else 1.0)
        else:
            seed = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8])
            generator = torch.Generator(device).manual_seed(seed)
            whole.normal_(0.0, _STANDARD_DEVIATION, generator=generator)
        part = whole[index]
        # Cloned, because a view would keep the whole tensor in memory.
        return part if part.shape == whole.shape else part.clone()
