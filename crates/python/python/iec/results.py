"""Requests and results."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Choice", "Event", "Result", "Sampling", "Token", "ToolCall", "Usage"]


@dataclass(frozen=True)
class Sampling:
    """Common fields of a request, for use in several calls; ``None`` leaves a field to the model's default.

    All names are those of the server's API, and every field of it may be given to a call by its name, too.

    >>> Sampling(temperature=0.0, max_tokens=8).fields()
    {'max_tokens': 8, 'temperature': 0.0}
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    structured_outputs: Mapping[str, Any] | None = None
    adapters: Sequence[Any] | None = None

    def fields(self) -> dict[str, Any]:
        """Returns the fields that are set."""
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Token:
    """A token, with its log-probability and the most likely tokens at its place if they were asked for."""

    id: int
    logprob: float | None = None
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool; ``arguments`` is a JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Choice:
    """A text of an answer."""

    index: int
    text: str
    reasoning: str
    tool_calls: list[ToolCall]
    tokens: list[Token]
    prompt_tokens: list[Token]
    finish_reason: str | None
    stop_reason: str | int | None

    @property
    def token_ids(self) -> list[int]:
        """Ids of the generated tokens."""
        return [token.id for token in self.tokens]

    @property
    def logprobs(self) -> list[float | None]:
        """Log-probabilities of the generated tokens, if they were asked for."""
        return [token.logprob for token in self.tokens]


@dataclass(frozen=True)
class Usage:
    """Number of tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Result:
    """Answer to a request. ``text`` and its like are those of the first choice."""

    choices: list[Choice]
    usage: Usage
    seed: int
    ignored: list[str]

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def reasoning(self) -> str:
        """Reasoning of the first choice."""
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> list[ToolCall]:
        """Calls of tools of the first choice."""
        return self.choices[0].tool_calls

    @property
    def token_ids(self) -> list[int]:
        """Ids of the generated tokens of the first choice."""
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> list[float | None]:
        """Log-probabilities of the generated tokens of the first choice."""
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> str | None:
        """Reason why the first choice ended: stop, length, tool_calls or cancelled."""
        return self.choices[0].finish_reason


@dataclass(frozen=True)
class Event:
    """Change of an answer.

    ``kind`` is text, reasoning, tool_call, tool_arguments or end. ``text`` is new text, reasoning or arguments.
    """

    choice: int
    kind: str
    text: str = ""
    index: int = 0
    id: str = ""
    name: str = ""
    finish_reason: str | None = None
    tokens: list[Token] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """Ids of the tokens whose text the event shows."""
        return [token.id for token in self.tokens]


def tokens_of(tokens: Sequence[Any]) -> list[Token]:
    return [Token(id, logprob, top) for id, logprob, top in tokens]


def event_of(parts: Sequence[Any]) -> Event:
    choice, kind, text, index, id, name, tokens = parts
    finish = text if kind == "end" else None
    return Event(choice, kind, "" if finish else text, index, id, name, finish, tokens_of(tokens))


def result_of(answer: str) -> Result:
    found = json.loads(answer)

    def tokens(listed: Sequence[Mapping[str, Any]]) -> list[Token]:
        return [
            Token(one["id"], one.get("logprob"), [(id, logprob) for id, logprob in one.get("top", [])])
            for one in listed
        ]

    choices = [
        Choice(
            index=one["index"],
            text=one["text"],
            reasoning=one.get("reasoning", ""),
            tool_calls=[ToolCall(**call) for call in one.get("tool_calls", [])],
            tokens=tokens(one["tokens"]),
            prompt_tokens=tokens(one.get("prompt_tokens", [])),
            finish_reason=one["finish"],
            stop_reason=one["stop_reason"],
        )
        for one in found["choices"]
    ]
    return Result(choices, Usage(**found["usage"]), found["seed"], found.get("ignored", []))
