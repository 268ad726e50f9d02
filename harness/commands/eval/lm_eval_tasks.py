"""Tasks of `eval` from lm-evaluation-harness, which makes the prompts and scores the answers."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import inspect
import io
import json
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from harness.commands.eval.record import LM_EVAL
from harness.commands.eval.tasks import Judgement, Problem, Task
from harness.config.errors import RunError, SettingError
from harness.config.failures import first_line, is_unreachable
from harness.engines.tokenizer import Tokenizer

# Defaults of lm-evaluation-harness: the seed of its examples, and the longest answer.
_EXAMPLES_SEED = 1234
_MAX_TOKENS = 256
# Names under which a task may give the longest answer.
_MAX_TOKENS_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# The answer that its filters find in a completion without one.
_NO_ANSWER = "[invalid]"
# How many questions the metrics are tried on.
_NUM_TRIAL_QUESTIONS = 4


@dataclass(frozen=True)
class Score:
    """The value of one metric, for the answer that one filter found in a completion."""

    filter: str
    metric: str
    value: Any
    answer: Any

    @property
    def is_binary(self) -> bool:
        return isinstance(self.value, Real | np.bool_) and float(self.value) in (0, 1)


class LmEvalTask(Task):
    """One task with its prompts.

    An `instance`, in lm-evaluation-harness's words, is one question; its `args` are the prompt and
    the settings of the generation. A filter finds the answer in a completion, and a metric scores
    it.

    Attributes:
        task: the task as the user names it, `gsm8k` or `lm_eval:gsm8k`.
        ends: texts that end a completion.
        max_tokens: the most tokens that a completion may have.
        metric_column: the metric and filter that decide, for the results.

    Raises:
        SettingError: the task cannot be asked.
        RunError: its data are out of reach.
    """

    def __init__(self, task: str) -> None:
        self.task = task
        self._loaded = _load(task)
        _refuse_what_is_not_text(task, self._loaded)
        # The examples that lm-evaluation-harness itself would show.
        self._loaded.set_fewshot_seed(_EXAMPLES_SEED)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                self._loaded.build_all_requests()
        except Exception as error:
            rule = f"lm-evaluation-harness cannot make its prompts ({first_line(error)})"
            raise SettingError("task", rule, task) from error
        self._instances = list(self._loaded.instances)
        generation: Mapping[str, Any] = self._instances[0].args[1]
        if any(instance.args[1] != generation for instance in self._instances):
            rule = "must have the same generation_kwargs for all questions"
            raise SettingError("task", rule, task)
        until = generation.get("until") or ()
        self.ends = (until,) if isinstance(until, str) else tuple(until)
        limits = [generation[name] for name in _MAX_TOKENS_NAMES if generation.get(name)]
        self.max_tokens = int(limits[0]) if limits else _MAX_TOKENS
        self._filter, self._metric = self._find_metric()
        self.metric_column = f"{self._metric}, {self._filter}"

    @property
    def origin(self) -> str:
        """A line about the questions and their metric."""
        version = importlib.metadata.version("lm_eval")
        questions = f"{len(self._instances)} questions by lm-evaluation-harness {version}"
        return f"task={self.task}: {questions}, scored by {self._metric} (filter {self._filter})"

    @property
    def digest(self) -> str:
        """A digest of the prompts too, because a task's name does not say which version it is."""
        contexts = [_prompt(instance) for instance in self._instances]
        config = json.dumps(self._loaded.dump_config(), sort_keys=True, default=_source_of)
        parts = [self.origin, config, *contexts]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]

    def check_answer_length(
        self,
        tokenizer: Tokenizer,
        problems: Sequence[Problem],
        max_new_tokens: int,
    ) -> None:
        """Refuse a limit that would cut off what the task lets a model write."""
        if max_new_tokens < self.max_tokens:
            rule = f"must be at least {self.max_tokens}, the max_gen_toks of {self.task}"
            raise SettingError("decoding.max_new_tokens", rule, max_new_tokens)

    def problems(self, seed: int, count: int) -> list[Problem]:
        """Draw `count` of the questions."""
        num_rows = len(self._instances)
        if count > num_rows:
            rule = f"the task {self.task} has only {num_rows} questions"
            raise SettingError("num_prompts", rule, count)
        source_rows = list(range(num_rows))
        random.Random(seed).shuffle(source_rows)
        problems = []
        for index, source_row in enumerate(source_rows[:count]):
            instance = self._instances[source_row]
            problem = Problem(
                seed,
                index,
                a=None,
                b=None,
                expected=str(self._loaded.doc_to_target(instance.doc)),
                prompt=_prompt(instance),
                source_row=source_row,
            )
            problems.append(problem)
        return problems

    def judge(self, text: str, problem: Problem) -> Judgement:
        """Judge a completion by the metric of lm-evaluation-harness."""
        assert problem.source_row is not None
        completion = _cut(text, self.ends)
        for score in self._scores(self._instances[problem.source_row], completion):
            if (score.filter, score.metric) == (self._filter, self._metric):
                if not score.is_binary:
                    raise RunError(f"{self.task}: {self._metric} is {score.value}, not 0 or 1")
                answer = None if score.answer == _NO_ANSWER else str(score.answer)
                return Judgement(completion, answer, bool(score.value))
        raise RunError(f"{self.task}: a completion has no {self._metric}")

    def _scores(self, instance: Any, completion: str) -> list[Score]:
        """Return all metrics of a completion, filter by filter."""
        answered = dataclasses.replace(instance, resps=[completion], filtered_resps={})
        scores = []
        try:
            # `apply_filters` reads the task's own instances, so these become the one that was
            # answered; `_instances` is a copy with all of them.
            self._loaded.instances[:] = [answered]
            self._loaded.apply_filters()
            for name, answer in answered.filtered_resps.items():
                metrics = self._loaded.process_results(answered.doc, [answer])
                scores += [Score(name, metric, value, answer) for metric, value in metrics.items()]
        except Exception as error:
            raise RunError(f"{self.task} cannot score a completion: {first_line(error)}") from error
        return scores

    def _find_metric(self) -> tuple[str, str]:
        """Return the first filter and metric whose values are only ever 0 or 1.

        They are tried on right, wrong and half right completions.
        """
        scores: list[Score] = []
        for instance in self._instances[:_NUM_TRIAL_QUESTIONS]:
            target = str(self._loaded.doc_to_target(instance.doc))
            for completion in (target, "", f"{target} and more", f"It is {target}"):
                scores += self._scores(instance, completion)
        unfit = {(score.filter, score.metric) for score in scores if not score.is_binary}
        higher_is_better = self._loaded.higher_is_better()
        for score in scores:
            named = score.filter, score.metric
            if named not in unfit and higher_is_better.get(score.metric, True):
                return named
        metrics = ", ".join(dict.fromkeys(score.metric for score in scores))
        rule = (
            f"needs a metric that is 0 or 1 for each question, such as exact_match; has {metrics}"
        )
        raise SettingError("task", rule, self.task)


def _load(task: str) -> Any:
    """Load the task as lm-evaluation-harness makes it, with its data."""
    name = task.removeprefix(LM_EVAL)
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        rule = "needs lm-evaluation-harness: pip install 'specharness[lm-eval]'"
        raise SettingError("task", rule, task) from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    is_file = name.endswith((".yaml", ".yml"))
    if is_file and not Path(name).is_file():
        raise SettingError("task", "there is no such file", task)
    manager = TaskManager(include_defaults=not is_file)
    if not is_file and name not in manager.all_tasks:
        raise SettingError("task", "lm-evaluation-harness has no task of this name", task)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            loaded = list(manager.load([name])["tasks"].values())
    except Exception as error:
        if is_unreachable(error):
            raise RunError(f"the data of {task} are out of reach: {first_line(error)}") from error
        rule = f"lm-evaluation-harness cannot load it ({first_line(error)})"
        raise SettingError("task", rule, task) from error
    if len(loaded) != 1:
        names = ", ".join(task.task_name for task in loaded[:5])
        rule = f"is a group of {len(loaded)} tasks ({names}, ...); name one of them"
        raise SettingError("task", rule, task)
    return loaded[0]


def _refuse_what_is_not_text(task: str, loaded: Any) -> None:
    """Refuse tasks without a text to generate, and those that run what a model wrote."""
    rule = None
    if loaded.OUTPUT_TYPE != "generate_until":
        rule = f"must be a task with output_type generate_until, not {loaded.OUTPUT_TYPE}"
    elif getattr(loaded, "MULTIMODAL", False):
        rule = "must ask in text alone, without images or sound"
    elif getattr(loaded, "UNSAFE_CODE", False):
        rule = "would run code that a model wrote, which eval does not do"
    elif (repeats := loaded.get_config("repeats") or 1) > 1:
        rule = f"asks each question {repeats} times, and eval asks once"
    if rule is not None:
        raise SettingError("task", rule, task)


def _prompt(instance: Any) -> str:
    return str(instance.args[0])


def _source_of(value: Any) -> str:
    """The code of a function, whose `str` has an address; the `str` of any other value."""
    if not inspect.isroutine(value):
        return str(value)
    try:
        return inspect.getsource(value)
    except (TypeError, OSError):
        return f"{value.__module__}.{value.__qualname__}"


def _cut(text: str, ends: Sequence[str]) -> str:
    """Cut a text before the end that is complete first, after which a server writes nothing."""
    present = [end for end in ends if end and end in text]
    places = [(text.index(end) + len(end), text.index(end)) for end in present]
    _, start = min(places, default=(0, len(text)))
    return text[:start]
