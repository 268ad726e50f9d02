"""`distill`: train a draft model or a head on the target's own answers, and measure it before and
after.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import filelock
import torch

from harness.commands.distill.loop import Course, DamagedStateError, TrainingText, cast, train
from harness.commands.distill.record import DistillSettings
from harness.commands.distill.rows import DistillRow
from harness.commands.distill.tables import distill_document
from harness.commands.latency.measure import Latency
from harness.config.errors import SettingError
from harness.drafting.heads.new_heads import initialise, save_head
from harness.engines.protocol import in_batches
from harness.engines.timing import generate
from harness.measuring.progress import progress, say
from harness.measuring.session import Session
from harness.menu.command import Experiment
from harness.results.verdict import require_verdict


class Distill(Experiment):
    """The first prompts of the file are measured, the others are answered by the target and
    learned.

    Answers and the state of the training are kept in `training`, a subdirectory of the output,
    until the draft is complete, so that the same command goes on after a kill, and comes to the
    same weights.

    Attributes:
        stages: `latency` with the untrained draft, and with the trained one.
        figures: columns of `DistillRow` about the training, filled by `_train`.
        prompts: those that are learned.
        output, work: the directory of the draft, and the subdirectory of the unfinished training.
    """

    document = staticmethod(distill_document)

    def __init__(self, settings: DistillSettings) -> None:
        self.settings = settings
        self.stages = {"before": Latency(settings), "after": Latency(settings)}
        self.figures: dict[str, Any] = {}
        before = self.stages["before"]
        measured = {prompt.index for prompt in before.prompts}
        everything = before.prompt_set.prompts
        self.prompts = tuple(prompt for prompt in everything if prompt.index not in measured)
        if not self.prompts:
            rule = f"leaves none to learn from: the prompt set has {len(everything)}"
            raise SettingError("num_prompts", rule, settings.num_asked)
        self.output = Path(settings.directory)
        self.work = self.output / "training"

    def measure(self, session: Session) -> None:
        for path in (self.output, *self.output.parents):
            if path.is_file():
                rule = f"must be a directory; {path} is a file"
                raise SettingError("output", rule, str(self.output))
        if (self.output / "config.json").exists():
            rule = f"holds a draft already: choose another one, or measure it (latency {self._as_draft()})"
            raise SettingError("output", rule, str(self.output))
        self.work.mkdir(parents=True, exist_ok=True)
        try:
            lock = filelock.FileLock(self.work / "lock").acquire(timeout=0)
        except filelock.Timeout:
            rule = "another process is training in it"
            raise SettingError("output", rule, str(self.output)) from None
        with lock:
            self._begin_or_go_on()
            self._measure(session)

    def _measure(self, session: Session) -> None:
        settings = self.settings
        before = self.stages["before"]
        token_ids = session.encode(self.prompts, new_tokens=settings.answer_tokens)
        measured = session.encode(before.prompts)
        longest = max(map(len, (*token_ids, *measured)))
        # With room for what is measured and for what is learned.
        rows, rows_setting = max(
            (settings.batch_size, "batch_size"), (settings.texts_per_step, "texts_per_step")
        )
        new_tokens, tokens_setting = max(
            (settings.decoding.max_new_tokens, "decoding.max_new_tokens"),
            (settings.answer_tokens, "answer_tokens"),
        )
        placed = session.place(
            rows,
            longest,
            new_tokens,
            rows_setting=rows_setting,
            tokens_setting=tokens_setting,
        )
        assert placed is not None
        assert settings.draft is not None
        if placed.head is not None and not placed.head.kind.trains:
            kind = placed.head.kind.name
            trained = "EAGLE-3, DFlash, DFlash 2, JetSpec or Medusa"
            rule = f"must be an {trained} head to be trained, not {kind}"
            raise SettingError("draft", rule, settings.draft.name)
        pair = session.pair
        module: Any = pair.head
        if pair.head is None:
            assert pair.draft is not None
            module = pair.draft.model
        else:
            # It may be on a GPU with more room, where it drafts.
            module.to(pair.target.input_device)
        dtype = next(module.parameters()).dtype
        if settings.draft.method == "new_head":
            torch.manual_seed(settings.seed)
            initialise(module, pair.target.model)
        before.measure(session)
        self._train(session, module, self._texts(session, token_ids, longest))
        # Measure the weights as they are stored.
        cast(module, torch.bfloat16, dtype)
        self._save(session, module)
        self.stages["after"].measure(session)

    def rows(self, session: Session) -> list[DistillRow]:
        """A row per stage and arm; figures of the training are in those of the second stage."""
        rows = []
        for stage, latency in self.stages.items():
            figures = {"stage": stage} | (self.figures if stage == "after" else {})
            columns = DistillRow.setting_columns(self.settings)
            for row in latency.rows(session):
                rows.append(DistillRow(**(columns | vars(row) | figures)))
        return rows

    def judge(self, rows: Sequence[DistillRow]) -> None:
        require_verdict(rows)

    def _train(self, session: Session, module: Any, texts: Sequence[TrainingText]) -> None:
        settings = self.settings
        course = Course(
            epochs=settings.epochs,
            batch_size=settings.texts_per_step,
            learning_rate=settings.learning_rate,
            chain=settings.chain,
            seed=settings.seed,
        )
        state = self.work / "state.pt"
        started = time.perf_counter()
        with progress("training", course.num_steps(len(texts))) as advance:
            try:
                losses = train(
                    module,
                    session.pair.target.model,
                    texts,
                    course,
                    state,
                    vocabulary_size=session.pair.vocabulary_size,
                    save_every=settings.save_every,
                    advance=lambda loss: advance(f"training, loss {loss:.3f}"),
                )
            except DamagedStateError as error:
                raise self._damaged(state) from error
        tail = losses[-max(1, len(losses) // 10) :]
        num_tokens = sum(len(text.tokens) - text.prompt_length for text in texts)
        self.figures = {
            "num_texts": len(texts),
            "num_learned_tokens": settings.epochs * num_tokens,
            "num_steps": len(losses),
            "loss": sum(tail) / len(tail),
            "training_s": time.perf_counter() - started,
        }

    def _texts(
        self, session: Session, token_ids: Sequence[Sequence[int]], longest: int
    ) -> list[TrainingText]:
        """Every prompt with the target's answer at each temperature.

        `answers.jsonl` has a line for each batch of answers; those that an earlier run stored are
        read.
        """
        settings = self.settings
        file = self.work / "answers.jsonl"
        places = in_batches(range(len(token_ids)), settings.texts_per_step)
        batches = [
            (temperature, batch) for temperature in settings.temperatures for batch in places
        ]
        sizes = [len(batch) for _, batch in batches]
        try:
            answers = _stored_answers(file, sizes, session.pair.vocabulary_size)
        except ValueError as error:
            raise self._damaged(file) from error
        num_stored = len(answers)
        decoding = dataclasses.replace(settings.decoding, max_new_tokens=settings.answer_tokens)
        engine = session.open(settings.texts_per_step, longest, decoding)
        with (
            file.open("a", encoding="utf-8") as store,
            progress("answering", len(batches)) as advance,
        ):
            for number, (temperature, batch) in enumerate(batches):
                if number >= num_stored:
                    # Each answer has its own random numbers, which no measured prompt has.
                    first = settings.num_asked + number * settings.texts_per_step
                    streams = range(first, first + len(batch))
                    prompts = [token_ids[place] for place in batch]
                    how = dataclasses.replace(decoding, temperature=temperature)
                    question = session.ask(prompts, streams, how)
                    answers.append(generate(engine, engine.arms[0], question).tokens)
                    store.write(json.dumps(answers[-1]) + "\n")
                    store.flush()
                advance(None)
        return [
            TrainingText([*token_ids[place], *answer], len(token_ids[place]))
            for (_, batch), of_batch in zip(batches, answers, strict=True)
            for place, answer in zip(batch, of_batch, strict=True)
        ]

    def _save(self, session: Session, module: Any) -> None:
        draft = self.work / "draft"
        if session.pair.head is None:
            module.save_pretrained(draft)
            session.tokenizer.save_pretrained(draft)
        else:
            assert session.placed is not None
            assert session.placed.head is not None
            save_head(
                checkpoint=session.placed.head, head=module, directory=draft, dtype=torch.bfloat16
            )
        # A directory that is only half written does not look complete: the configuration comes
        # last.
        for file in sorted(draft.iterdir(), key=lambda file: file.name == "config.json"):
            file.replace(self.output / file.name)
        (self.work / "answers.jsonl").replace(self.output / "answers.jsonl")
        shutil.rmtree(self.work)
        say(f"trained draft: {self._as_draft()}")

    def _as_draft(self) -> str:
        """The setting by which other commands use the trained draft."""
        return f"draft={self.output}" if self.output.is_absolute() else f"draft=./{self.output}"

    def _damaged(self, file: Path) -> SettingError:
        problem = f"holds an unfinished training whose {file.name} is damaged"
        return SettingError("output", f"{problem}: resume=false begins again", str(self.output))

    def _begin_or_go_on(self) -> None:
        """Begin a training, or go on with the same one that the output directory holds.

        `training/settings` has a digest of the settings that the training depends on.
        """
        settings = self.settings
        values = dataclasses.asdict(settings)
        learned = [values[name] for name in settings.LEARNED]
        text = json.dumps(learned, default=str, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        file = self.work / "settings"
        if not settings.resume:
            shutil.rmtree(self.work, ignore_errors=True)
        elif file.exists() and file.read_text(encoding="utf-8") != digest:
            rule = "holds an unfinished training with other settings: choose another directory, or resume=false"
            raise SettingError("output", rule, str(self.output))
        self.work.mkdir(parents=True, exist_ok=True)
        file.write_text(digest, encoding="utf-8")


def _stored_answers(
    file: Path, batch_sizes: Sequence[int], vocabulary_size: int
) -> list[list[list[int]]]:
    """The answers of the first batches that an earlier run stored, token ids each.

    A line has the answers of a batch; half a line, which a kill may leave, is cut off.

    Raises:
        ValueError: the file holds anything else.
    """
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    complete = [line for line in lines if line.endswith("\n")]
    if complete != lines:
        os.truncate(file, len("".join(complete).encode()))
    stored = []
    for line, size in zip(complete, batch_sizes[: len(complete)], strict=True):
        answers = json.loads(line)
        if not isinstance(answers, list) or len(answers) != size:
            raise ValueError("other answers than were asked for")
        for answer in answers:
            if not isinstance(answer, list) or not all(
                type(token) is int and 0 <= token < vocabulary_size for token in answer
            ):
                raise ValueError("an answer with other things than tokens")
        stored.append(answers)
    return stored


EXPERIMENT = Distill
