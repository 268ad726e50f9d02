"""What requests may hold, as OpenAI and vLLM name it; anything else is refused with a reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

# Parameters of these APIs that would change the answer, and that this service does not have.
_UNSUPPORTED = frozenset(
    "audio best_of echo frequency_penalty function_call functions guided_json logit_bias logprobs min_p min_tokens "
    "modalities n presence_penalty prompt_logprobs repetition_penalty response_format suffix tool_choice tools "
    "top_logprobs use_beam_search".split()
)
# Values at which they change nothing, apart from 0, false, null and empty ones.
_NEUTRAL = (1, {"type": "text"}, ["text"], "none", "auto")


def _encodable(text: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("must be text, without half characters")
    return text


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Text = Annotated[str, AfterValidator(_encodable)]
Stop = Annotated[Text, Field(min_length=1, max_length=1000)]
TokenId = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1, le=10**9)]


class Sampling(BaseModel):
    """The fields of every request to generate. The service's own settings fill those left out.

    `index` is the prompt's place in the stream of random numbers: with the same `seed` and `index` the answer is the
    one that `latency` measures.
    """

    model_config = ConfigDict(extra="allow")

    model: Annotated[Text, Field(max_length=500)] | None = None
    temperature: float | None = Field(default=None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=10**9, description="0 and -1 keep all")
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: Annotated[list[Stop], Field(max_length=16), BeforeValidator(_listed)] = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1000)] = []
    ignore_eos: bool = False
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    index: int = Field(default=0, ge=0, lt=2**31)
    stream: bool = False
    stream_options: dict[str, Any] = {}
    return_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, body: Any) -> Any:
        return (
            {name: value for name, value in body.items() if value is not None}
            if isinstance(body, dict)
            else body
        )

    @model_validator(mode="after")
    def _check_others(self) -> Sampling:
        for name, value in (self.model_extra or {}).items():
            if name in _UNSUPPORTED and value and value not in _NEUTRAL:
                raise ValueError(f"{name}: this service does not have it; leave it out")
        return self


class Completion(Sampling):
    """A prompt or several, as text or as token ids."""

    prompt: Text | list[Text] | list[TokenId] | list[list[TokenId]]

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        prompt: Any = self.prompt
        return (
            prompt
            if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
            else [prompt]
        )


class Part(BaseModel):
    type: Literal["text"]
    text: Text


class Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[Part]

    @property
    def text(self) -> str:
        return (
            self.content
            if isinstance(self.content, str)
            else "".join(part.text for part in self.content)
        )


class Chat(Sampling):
    """Messages. Where the model has no chat template, they are paragraphs of one text."""

    messages: Annotated[list[Message], Field(min_length=1)]
