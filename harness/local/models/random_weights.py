"""Models with random weights: a checkpoint's architecture and quantization, without its weights.

Times of passes hardly depend on the values of weights, so a pair can be measured before its weights are downloaded.
(Weights decide which experts a mixture of experts reads, and which draft tokens are accepted.)

Random weights are loaded by the same code as stored weights. transformers gets a state dict, and a tensor of it is made
only when transformers reads it, on the device where it belongs. So tensors are made and quantized one at a time, and
the state dict as a whole is never in memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from harness.config.run import WeightsSource
from harness.config.settings import ModelSettings, require
from harness.local.models.checkpoints import Checkpoint, read_checkpoint, stored_quantization
from harness.local.models.sketch import DeviceMap, bare_model, owning_module
from harness.local.models.tokenizers import check_vocabularies, vocabulary_size

# The standard deviation of random weights. Most architectures use this value at the beginning of training.
_STANDARD_DEVIATION = 0.02


def checkpoint_for(role: str, settings: ModelSettings, weights: WeightsSource | None) -> Checkpoint:
    """Read the checkpoint of a model, for a run with stored or random weights.

    For random weights, the architecture that a preset states is enough, or a configuration.

    Args:
        role: `model` or `draft`, for errors.
        weights: the run's setting `weights`; None if the pair is only planned. Then no weights are needed.

    Raises:
        SettingError, RunError: as from `read_checkpoint`.
        SettingError: `weights` is `random`, and the stored weights are in GGUF, or already quantized: random numbers
            cannot be stored so.
    """
    if weights != "random":
        return read_checkpoint(role, settings, needs_weights=weights is not None)
    rule = f"cannot be random for {role}={settings.name}"
    require(settings.gguf_file is None, "weights", f"{rule}: its format is GGUF", "random")
    checkpoint = read_checkpoint(role, settings, needs_weights=False)
    stored = stored_quantization(checkpoint.config)
    require(stored is None, "weights", f"{rule}: its weights are quantized with {stored}", "random")
    return dataclasses.replace(checkpoint, random=True)


def random_tokenizer(
    target: Checkpoint, draft: Checkpoint | None = None
) -> PreTrainedTokenizerBase:
    """Return a tokenizer for models with random weights, which generate meaningless text. It has a token for each byte
    of a text (for as many of the 256 bytes as the vocabulary has room), and tokens such as `<300>` for all other ids.

    Args:
        draft: the checkpoint of a draft model; None without one.

    Raises:
        SettingError: the sizes of the two models' vocabularies differ by more than padding explains
            (`check_vocabularies`).
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
    """Return the class of a model, and a state dict for the class's `from_pretrained`. The numbers in it are the same
    in every run on the same kind of device, in the same dtype.
    """
    bare = bare_model(checkpoint, dtype)
    repository = checkpoint.settings.repository
    tensors = {}
    for name, tensor in bare.named_parameters():
        device = device_map[owning_module(name, device_map)]
        tensors[name] = RandomTensor(f"{repository} {name}", tensor.shape, tensor.dtype, device)
    return type(bare), tensors


@dataclasses.dataclass(frozen=True)
class RandomTensor:
    """A random tensor that is made when it is indexed, as a tensor of a safetensors file is read when it is indexed.

    Attributes:
        name: the seed of the numbers, so that tensors with equal names have equal numbers (on the same kind of device).
            It ends with the tensor's name in the model.
        device: the index of a GPU, or `cpu`.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: int | str

    def get_shape(self) -> list[int]:
        """Return the shape. Slices of safetensors files have this method too."""
        return list(self.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        device = torch.device("cpu")
        if isinstance(self.device, int):
            device = torch.device("cuda", self.device)
        whole = torch.empty(self.shape, dtype=self.dtype, device=device)
        if len(self.shape) < 2:
            # Vectors are weights of norms, which become 1, and biases, which become 0. So norms keep activations finite
            # through any number of layers.
            whole.fill_(0.0 if self.name.endswith("bias") else 1.0)
        else:
            seed = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8])
            generator = torch.Generator(device).manual_seed(seed)
            whole.normal_(0.0, _STANDARD_DEVIATION, generator=generator)
        part = whole[index]
        # The part is copied, because a view would keep the whole tensor in memory.
        return part if part.shape == whole.shape else part.clone()
