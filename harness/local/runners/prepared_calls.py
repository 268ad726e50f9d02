"""The calls that a prepared runner replays, and how they are made: compiled, captured, compared.

A *pass* reads tokens of one shape into the slots. A *call* is a pass, a pass with the decision
after it, the draws of a draft with a pass before each, or the reading of a new batch's prompts. Of
2 rows and K = 3 a target that is captured has these calls, each for 2 rows and for 1:

    text, 1 token       text, 1 token, Draw        regular decoding
    text, 4 tokens      text, 4 tokens, Judge      verifying 3 draft tokens
    prompts, 32 tokens                             for 2 rows alone

Fewer rows or tokens are filled up to the next shape that is prepared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from harness.local.decoding.decisions import Decision
from harness.local.decoding.randomness import draw
from harness.local.decoding.warp import AnyWarp, Warp
from harness.local.runners import prompt_passes, tree_passes
from harness.local.runners.checks import refusing, require_close
from harness.local.runners.graphs import FixedCall, GraphRecorder, TensorCall
from harness.local.runners.prompt_passes import PromptPass
from harness.local.runners.regions import compile_call
from harness.local.runners.sizes import least_fitting
from harness.local.runners.slots import SlotForward, Slots, UnsupportedModelError
from harness.local.runners.tree_passes import TreeDemand, TreeInputs, TreePass


class CompilationError(UnsupportedModelError):
    """A model that cannot be compiled; it may still be possible to capture it."""


@dataclass(frozen=True)
class RunnerShapes:
    """The shapes that a runner is prepared for. Decisions and passes over prompts are captured, and
    never compiled: on a CPU that would take seconds, and save about 1 % of an iteration.

    Attributes:
        batch_size: the most rows of a batch.
        num_slots: the most tokens of a row, draft tokens beyond its end included.
        widths: the numbers of tokens of an extension; for a draft, of decided tokens that it has
            not been fed.
        num_drawn: each K of a draft; a target draws nothing.
        warp: for the tokens drawn.
        decisions: what may be decided after an extension, by its width.
        longest_prompt: the most tokens of a prompt; 0 for no passes over prompts.
        trees: what is read and decided of trees.
    """

    batch_size: int = 0
    num_slots: int = 0
    widths: Sequence[int] = ()
    num_drawn: Sequence[int] = ()
    warp: AnyWarp = field(default_factory=Warp)
    decisions: Mapping[int, Sequence[Decision]] = field(default_factory=dict)
    longest_prompt: int = 0
    trees: TreeDemand = field(default_factory=TreeDemand)

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", sorted(set(self.widths)))
        object.__setattr__(self, "num_drawn", sorted(set(self.num_drawn)))


class CallName(NamedTuple):
    """Names a call by its shape.

    Attributes:
        kind: `text` and `tree` extend every row, and decide where there is a decision; `draw`
            extends by a text and draws; `prompts` begins a batch.
        num_tokens: of each row.
        num_drawn: K of a `draw`.
    """

    kind: Literal["text", "tree", "draw", "prompts"]
    num_rows: int
    num_tokens: int
    num_drawn: int = 0
    decision: TensorCall | None = None


# Raises UnsupportedModelError, with the difference in words, unless a prepared call computes from
# these inputs what it should.
Compare = Callable[[TensorCall, tuple[Tensor, ...], str], None]


class CallMaker:
    """Compiles calls of a model, and records them as CUDA graphs (on a CPU it gives them buffers
    alone). Each result is compared before it is used: by default its outputs must be those of the
    call that it was made of.
    """

    def __init__(self, model: Any, device: torch.device, *, compiled: bool, captured: bool) -> None:
        self.device = device
        self.compiles = compiled
        self.captures = captured
        self._model = model
        self._recorder: GraphRecorder | None = None
        if captured and device.type == "cuda":
            self._recorder = GraphRecorder(device)

    def compiled(
        self, call: TensorCall, inputs: tuple[Tensor, ...], compare: Compare | None = None
    ) -> TensorCall:
        """Compile a call over inputs of this shape; the same call if nothing is to be compiled.

        Raises CompilationError.
        """
        if not self.compiles:
            return call
        compiler = functools.partial(compile_call, model=self._model)
        with refusing(CompilationError, "cannot be compiled"):
            compiled = FixedCall(call, inputs, compiler=compiler)
            compare = compare or self._equal_to(call)
            compare(compiled, inputs, "compiled differ from the eager ones")
        return compiled

    def captured(
        self,
        call: TensorCall,
        inputs: tuple[Tensor, ...],
        others: tuple[Tensor, ...],
        compare: Compare | None = None,
    ) -> TensorCall:
        """Record a call over inputs of this shape; the same call if nothing is to be captured.

        Args:
            others: other inputs, to compare with: a graph that does nothing still has the outputs
                of its warm-up.

        Raises UnsupportedModelError.
        """
        if not self.captures:
            return call
        with refusing(UnsupportedModelError, "cannot be captured"):
            captured = FixedCall(call, inputs, self._recorder)
        with refusing(UnsupportedModelError, "cannot be captured"):
            captured.clear()
            compare = compare or self._equal_to(call)
            compare(captured, others, "captured differ from the eager ones")
        return captured

    def _equal_to(self, plain: TensorCall) -> Compare:
        """Return the comparison with the outputs of another call."""

        def compare(call: TensorCall, inputs: tuple[Tensor, ...], difference: str) -> None:
            require_close(call(*inputs), plain(*inputs), self._model, difference)

        return compare


class TextInputs(NamedTuple):
    """The inputs of a pass over texts.

    Attributes:
        tokens: [B, n], filled up.
        starts: [B], the slot of each row's first token.
        num_real: [], how many of the n tokens count. The others take the position of the last real
            one, so that none is outside of the model's context.
    """

    tokens: Tensor
    starts: Tensor
    num_real: Tensor

    def moved(self) -> TextInputs:
        """Return other inputs of the same shapes, of which a call has other outputs."""
        return self._replace(tokens=self.tokens + 1, starts=self.starts + 1)


class DrawInputs(NamedTuple):
    """The inputs of the draws of a draft: tokens [B, n] from slots starts [B] on, and uniforms
    [B, K], by which K tokens follow.
    """

    tokens: Tensor
    starts: Tensor
    uniforms: Tensor

    def moved(self) -> DrawInputs:
        """As `TextInputs.moved`."""
        return self._replace(tokens=self.tokens + 1, starts=self.starts + 1)


@dataclass(frozen=True)
class PreparedCalls:
    """Finds the call for a batch. The calls hold slots and model, but not their runner, so that
    they are freed with it. Without arguments there are no calls.

    Attributes:
        slots: what all calls read and write.
        sizes: the numbers of rows that are prepared, ascending.
        buckets: the numbers of tokens of a prompt that are prepared, ascending.
        counts: the numbers from 0 to the widest text, each [] on the device, for `num_real`.
        calls: by their names. They take the tensors of `TextInputs`, `tree_passes.TreeInputs`,
            `DrawInputs` or `prompt_passes.PromptInputs`, by the kind of the name, and behind them
            those of the decision.
    """

    slots: Slots = field(default_factory=lambda: Slots([]))
    shapes: RunnerShapes = field(default_factory=RunnerShapes)
    sizes: Sequence[int] = ()
    buckets: Sequence[int] = ()
    counts: Sequence[Tensor] = ()
    calls: Mapping[CallName, TensorCall] = field(default_factory=dict)

    def num_rows(self, num_rows: int) -> int:
        """Return the prepared number of rows for a batch that has room in the slots."""
        size = least_fitting(self.sizes, num_rows)
        assert size is not None
        return size

    def text(self, num_rows: int, num_tokens: int) -> CallName | None:
        """Name the smallest pass that tokens of a text can be filled up to; None without one."""
        width = least_fitting(self.shapes.widths, num_tokens)
        return None if width is None else CallName("text", self.num_rows(num_rows), width)

    def tree(self, num_rows: int, num_tokens: int, num_nodes: int) -> CallName | None:
        """Name the smallest pass that tokens of trees can be filled up to; None without one."""
        trees = self.shapes.trees
        width = least_fitting(trees.widths, num_tokens)
        num_with_root = num_nodes + 1
        if width is None or num_with_root > trees.most_tokens:
            return None
        return CallName("tree", self.num_rows(num_rows), width)

    def prompts(self, longest: int) -> CallName | None:
        """Name the call that reads prompts of up to this many tokens; None without one."""
        bucket = least_fitting(self.buckets, longest)
        return None if bucket is None else CallName("prompts", self.slots.num_rows, bucket)


def prepare_calls(
    forward: SlotForward, slots: Slots, shapes: RunnerShapes, maker: CallMaker
) -> PreparedCalls:
    """Make the calls of all shapes.

    Args:
        forward: the model over slots.
        slots: of as many rows and tokens as the shapes.
    """
    sizes = prepared_sizes(shapes.batch_size, are_compiled=maker.compiles)
    counts = torch.arange(max(shapes.widths) + 1, device=maker.device).unbind()
    buckets: Sequence[int] = ()
    if shapes.longest_prompt:
        buckets = prompt_passes.buckets(shapes.longest_prompt, slots.num_rows, slots.num_slots)
    passes = _passes(forward, slots, shapes, sizes, maker)
    calls: dict[CallName, TensorCall] = {}
    with refusing(UnsupportedModelError, "cannot be captured"):
        # The largest are made first: the others then find memory in the pool of their graphs.
        for name in reversed(passes):
            calls |= _calls_with(name, passes, counts, shapes, maker)
        prompt_pass = PromptPass(forward, slots)
        for bucket in reversed(buckets):
            example = prompt_passes.example(slots.num_rows, bucket, maker.device)
            name = CallName("prompts", slots.num_rows, bucket)
            calls[name] = maker.captured(prompt_pass, example, example.moved())
    return PreparedCalls(slots, shapes, sizes, buckets, counts, calls)


def _passes(
    forward: SlotForward,
    slots: Slots,
    shapes: RunnerShapes,
    sizes: Sequence[int],
    maker: CallMaker,
) -> dict[CallName, TensorCall]:
    """Return the passes of all shapes, the smallest first, compiled where they are to be."""
    passes: dict[CallName, TensorCall] = {}
    for size in sizes:
        own_slots = slots.first_rows(size)
        for width in shapes.widths:
            name = CallName("text", size, width)
            text_pass = functools.partial(forward, own_slots)
            passes[name] = maker.compiled(text_pass, _example(name, shapes, maker.device))
        for width in shapes.trees.widths:
            name = CallName("tree", size, width)
            tree_pass = TreePass(forward, own_slots)
            passes[name] = maker.compiled(tree_pass, _example(name, shapes, maker.device))
    return passes


def _calls_with(
    name: CallName,
    passes: Mapping[CallName, TensorCall],
    counts: Sequence[Tensor],
    shapes: RunnerShapes,
    maker: CallMaker,
) -> dict[CallName, TensorCall]:
    """Return the calls that begin with a pass: itself, with decisions, and with draws."""
    forward = passes[name]
    example = _example(name, shapes, maker.device)
    calls = {name: maker.captured(forward, example, example.moved())}
    decisions: Sequence[Decision] = ()
    if name.kind == "text":
        decisions = shapes.decisions.get(name.num_tokens, ())
    elif name.num_tokens == shapes.trees.most_tokens:
        decisions = shapes.trees.decisions
    for decision in decisions:
        logits = forward(*example)[0]
        inputs = decision.examples(logits)
        decided = DecidedPass(forward, decision, type(example))
        calls[name._replace(decision=decision)] = maker.captured(
            decided, (*example, *inputs), (*example.moved(), *inputs)
        )
    if name.kind == "text":
        for number in reversed(shapes.num_drawn):
            draws = functools.partial(_draw, passes, counts, shapes.warp)
            uniforms = torch.full((name.num_rows, number), 0.5, device=maker.device)
            drawing = DrawInputs(example.tokens, example.starts, uniforms)
            drawn = CallName("draw", name.num_rows, name.num_tokens, number)
            calls[drawn] = maker.captured(draws, drawing, drawing.moved())
    return calls


def _example(name: CallName, shapes: RunnerShapes, device: torch.device) -> TextInputs | TreeInputs:
    """Return inputs of a pass that is only compared."""
    size, width = name.num_rows, name.num_tokens
    if name.kind == "tree":
        return tree_passes.example(size, width, shapes.trees.most_tokens, device)
    return TextInputs(
        tokens=torch.arange(size * width, device=device).view(size, width) % 16,
        starts=torch.zeros(size, dtype=torch.long, device=device),
        num_real=torch.full((), width, device=device),
    )


@dataclass(frozen=True)
class DecidedPass:
    """A pass and the decision after it, as one function of the inputs of both, the pass's first.

    Attributes:
        inputs: names those of the pass.
    """

    forward: TensorCall
    decision: Decision
    inputs: type[TextInputs] | type[TreeInputs]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of both, the pass's first."""
        num_of_pass = len(self.inputs._fields)
        outputs = self.forward(*tensors[:num_of_pass])
        logits = outputs[0]
        return *outputs, *self.decision(logits, *tensors[num_of_pass:])


def _draw(
    passes: Mapping[CallName, TensorCall],
    counts: Sequence[Tensor],
    warp: AnyWarp,
    tokens: Tensor,
    starts: Tensor,
    uniforms: Tensor,
) -> tuple[Tensor, ...]:
    """Draw by passes over texts; the last three are `DrawInputs`."""
    ends = starts.clone()

    def extend(tokens: Tensor) -> Tensor:
        num_rows, width = tokens.shape
        logits = passes[CallName("text", num_rows, width)](tokens, ends, counts[width])[0]
        ends.add_(width)
        return logits

    return draw(extend, tokens, uniforms, warp)


def prepared_sizes(batch_size: int, *, are_compiled: bool) -> list[int]:
    """Return the numbers of rows that calls are prepared for, ascending.

    A batch shrinks as its rows end. A capture is cheap, so each halving gets one; a compilation is
    not.
    """
    num_halvings = 0 if are_compiled else batch_size.bit_length() - 1
    return sorted(batch_size >> halving for halving in range(num_halvings + 1))
