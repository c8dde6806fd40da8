r"""A model's own chat template (Jinja, as `transformers` renders it), and the pieces of it that surround sampled turns.

    {head}{prompt}{ask}                       the task
    {sampled ids, normally ending in end}     never rendered, never encoded again
    {answer}{text of the tool}{answer_end}    up to where the policy writes again

The pieces are found by rendering conversations whose texts are marks, and cutting at the marks. So the text of a task or a tool is never
part of what is encoded as markup. A history of such pieces only grows; a template may write it otherwise, and `breaks` says where.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache, cached_property
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentrl_jax.chat.toolcalls import BARE, TAGGED, CallFormat, render_call
from agentrl_jax.chat.tools import Tool

DATE = datetime(2024, 7, 26)  # "today" in every prompt: a run of next week must get the ids of this one
_PROMPT, _TURN, _TEXT = "\ue010", "\ue011", "\ue012"  # private-use characters stand for texts

Messages = Sequence[Mapping[str, Any]]


class TemplateError(ValueError):
    """A chat template that no agent can be run with."""


@dataclass(frozen=True)
class Slot:
    """How a template writes the text of others: between `before` and `after`, perhaps without outer white space, perhaps as JSON."""

    before: str
    after: str
    trimmed: bool = False
    quoted: bool = False

    def written(self, text: str) -> str:
        """What stands between `before` and `after` for this text."""
        text = text.strip() if self.trimmed else text
        return json.dumps(text, ensure_ascii=False)[1:-1] if self.quoted else text

    def read(self, written: str) -> str:
        """The text again, but for white space that `written` left out."""
        return json.loads(f'"{written}"') if self.quoted else written


@dataclass(frozen=True)
class Layout:
    """task: around the first prompt; answer: around a tool's text, its `before` beginning with `end`; end: the token that closes a turn.

    role: of the messages that bring answers, "tool" or, where the template knows no tools, "user"
    """

    task: Slot
    answer: Slot
    end: str
    role: str


@dataclass(frozen=True)
class Break:
    """A conversation that the template writes otherwise than as it was sampled.

    what:     in words
    kept:     the history as it was sampled and sent
    rendered: as the template writes it
    """

    what: str
    kept: str
    rendered: str


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template and the tokens that it relies on.

    source: the text of chat_template.jinja
    stop:   tokens that end a turn, the usual one first
    bos:    the `bos_token` of the tokenizer; "" for none
    """

    source: str
    stop: tuple[str, ...]
    bos: str = ""

    def render(self, messages: Messages, tools: Sequence[Tool] = (), *, date: datetime = DATE) -> str:
        """The conversation up to where the assistant writes next. Raises TemplateError where the template refuses it."""
        try:
            return _compiled(self.source).render(
                messages=messages,
                tools=[tool.schema() for tool in tools] or None,
                add_generation_prompt=True,
                bos_token=self.bos,
                eos_token=self.stop[0],
                strftime_now=date.strftime,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise TemplateError(f"the chat template cannot write the conversation: {error}") from error

    def tells(self, tools: Sequence[Tool]) -> bool:
        """Whether the template declares tools to the model; that of a model which was not taught to call any leaves them out."""
        return self.render([user("-")], tools) != self.render([user("-")])

    def layout(self, system: str | None = None, tools: Sequence[Tool] = ()) -> Layout:
        """The pieces around sampled turns. Raises TemplateError where the template has no such pieces."""
        start = beginning(system)
        before = self.render([*start, user(_PROMPT)], tools)
        task = self._slot(before, _PROMPT, lambda text: self.render([*start, user(text)], tools))
        told = [*start, user("-"), assistant(_TURN)]
        for role in ("tool", "user"):  # a template without tools leaves out the text of one; users it knows
            rendered = self.render([*told, {"role": role, "content": _TEXT}], tools).partition(_TURN)[2]
            if _TEXT in rendered:
                break
        answer = self._slot(rendered, _TEXT, lambda text: self.render([*told, {"role": role, "content": text}], tools))
        ends = [token for token in self.stop if answer.before.startswith(token)]
        if not ends:
            raise TemplateError(f"the chat template ends a turn with {answer.before[:20]!r}, which is none of {', '.join(self.stop)}")
        return Layout(task, answer, max(ends, key=len), role)

    @staticmethod
    def _slot(rendered: str, mark: str, render: Any) -> Slot:
        before, found, after = rendered.partition(mark)
        if not found or mark in after:
            raise TemplateError(f"the chat template writes a message {rendered.count(mark)} times; it must be once")
        trimmed, quoted = f"\n {mark} \n" not in render(f"\n {mark} \n"), f'{mark}\\"' in render(f'{mark}"')
        return Slot(before, after, trimmed and not quoted, quoted)

    @cached_property
    def calls(self) -> CallFormat:
        """How this template writes tool calls; one that knows none gets tags."""
        call = {"type": "function", "function": {"name": "look", "arguments": {"path": _TEXT}}}
        try:
            rendered = self.render([user("-"), assistant("") | {"tool_calls": [call]}])
        except TemplateError:
            return TAGGED
        return BARE if '"parameters"' in rendered and TAGGED.open not in rendered else TAGGED

    @cached_property
    def breaks(self) -> tuple[Break, ...]:
        """Where the template would rewrite what was sampled. Policies keep what was sampled: training and sampling see the same ids."""
        layout, call = self.layout(), render_call("look", {"path": "a"}, self.calls)
        answer = ({"role": "tool", "content": "b"}, layout.answer)
        asked = ({"role": "user", "content": "b"}, None)
        structured = assistant("") | {"tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"path": "a"}}}]}
        probes = [
            ("a tool call", call, assistant(call), answer),
            ("a tool call that the server took apart", call, structured, answer),
            ("white space around a turn", f" \n{call}\n ", assistant(f" \n{call}\n "), answer),
        ]
        for what, thought in (("a think block", "<think>\nx\n</think>\n\n"), ("a think block without line ends", "<think>x</think>")):
            probes.append((f"{what}, then a tool's answer", thought + call, assistant(thought + call), answer))
        probes.append(("a think block, then a new question", "<think>\nx\n</think>\n\ny", assistant("<think>\nx\n</think>\n\ny"), asked))
        found = []
        for what, turn, message, (reply, slot) in probes:
            first = layout.task.before + "a" + layout.task.after + turn + layout.end
            try:
                rendered = self.render([user("a"), message, reply])
            except TemplateError as error:
                rendered = str(error)
            same = rendered.startswith(first) if slot is None else rendered == first + slot.before[len(layout.end) :] + "b" + slot.after
            if not same:
                found.append(Break(what, first, rendered))
        today, later = (self.render([user("a")], date=date) for date in (DATE, datetime(2025, 8, 27)))
        if today != later:
            found.append(Break(f"today's date, which stays {DATE:%d %b %Y}", today, later))
        return tuple(found)


def beginning(system: str | None) -> list[Mapping[str, Any]]:
    """The messages before the first question."""
    return [] if system is None else [{"role": "system", "content": system}]


def user(text: str) -> dict[str, Any]:
    """A message of the user."""
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    """A turn of the policy, calls and all, as it was written."""
    return {"role": "assistant", "content": text}


@cache
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise TemplateError(f"not a chat template: {error}") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Jinja's own filter would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
