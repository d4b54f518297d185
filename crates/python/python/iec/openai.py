"""Answers as dictionaries in the form of OpenAI's API, for programs that expect it. The fields of a request are those
of ``/v1/completions`` and ``/v1/chat/completions`` of the server.

>>> import iec
>>> with iec.Engine.embedded(threads=1) as engine:
...     answer = create_completion(engine, "Once upon a time", max_tokens=8, temperature=0)
...     chunks = list(create_completion(engine, "Once upon a time", max_tokens=8, temperature=0, stream=True))
>>> answer["choices"][0]["text"], answer["usage"]["completion_tokens"]
(', there was a little girl', 8)
>>> "".join(chunk["choices"][0]["text"] for chunk in chunks)
', there was a little girl'
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, overload

from .engine import Engine, Messages, Prompt, Stream, _body, _messages
from .errors import UsageError
from .results import Choice, Event, Result, Token

__all__ = ["create_chat_completion", "create_completion"]

Object = dict[str, Any]


@overload
def create_completion(
    engine: Engine, prompt: Prompt | Sequence[Prompt], *, stream: Literal[False] = ..., **fields: Any
) -> Object: ...
@overload
def create_completion(
    engine: Engine, prompt: Prompt | Sequence[Prompt], *, stream: Literal[True], **fields: Any
) -> Iterator[Object]: ...
def create_completion(
    engine: Engine, prompt: Prompt | Sequence[Prompt], *, stream: bool = False, **fields: Any
) -> Object | Iterator[Object]:
    """Continues a text, token ids or a list of either; returns a ``text_completion``, or an iterator of its chunks."""
    return _Form(engine, False, fields).answer({"prompt": prompt}, stream)


@overload
def create_chat_completion(
    engine: Engine, messages: Messages, *, stream: Literal[False] = ..., **fields: Any
) -> Object: ...
@overload
def create_chat_completion(
    engine: Engine, messages: Messages, *, stream: Literal[True], **fields: Any
) -> Iterator[Object]: ...
def create_chat_completion(
    engine: Engine, messages: Messages, *, stream: bool = False, **fields: Any
) -> Object | Iterator[Object]:
    """Answers a conversation; returns a ``chat.completion``, or an iterator of ``chat.completion.chunk``."""
    return _Form(engine, True, fields).answer({"messages": _messages(messages)}, stream)


class _Form:
    """The form of the answers to one request."""

    def __init__(self, engine: Engine, is_chat: bool, fields: Mapping[str, Any]) -> None:
        self.engine = engine
        self.is_chat = is_chat
        self.fields = dict(fields)
        self.model = str(self.fields.pop("model", None) or engine.describe()["family"])
        options = self.fields.pop("stream_options", None) or {}
        if not isinstance(options, Mapping) or set(options) - {"include_usage"}:
            raise UsageError("stream_options: expected an object with include_usage")
        self.shows_usage = bool(options.get("include_usage"))
        self.shows_logprobs = self.fields.get("logprobs") not in (None, False)
        self.id = ("chatcmpl-" if is_chat else "cmpl-") + uuid.uuid4().hex
        self.created = int(time.time())

    def answer(self, first: Mapping[str, Any], is_stream: bool) -> Object | Iterator[Object]:
        # The request begins here, and not when the first chunk is taken, so that a wrong field raises at once.
        stream = Stream(self.engine._native.stream(self.is_chat, _body(first, None, self.fields)))
        return self.chunks(stream) if is_stream else self.whole(stream.result())

    def envelope(self, choices: list[Object], is_chunk: bool) -> Object:
        kind = ("chat.completion.chunk" if is_chunk else "chat.completion") if self.is_chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def whole(self, result: Result) -> Object:
        answer = self.envelope([self.choice(choice) for choice in result.choices], False)
        answer["usage"] = _usage(result)
        return answer

    def choice(self, choice: Choice) -> Object:
        shown: Object = {"index": choice.index, "finish_reason": choice.finish_reason}
        if not self.is_chat:
            tokens = [*choice.prompt_tokens, *choice.tokens]
            return {**shown, "text": choice.text, "logprobs": self.logprobs(tokens)}
        message: Object = {"role": "assistant", "content": choice.text}
        if choice.reasoning:
            message["reasoning"] = choice.reasoning
        if choice.tool_calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in choice.tool_calls
            ]
        return {**shown, "message": message, "logprobs": self.logprobs(choice.tokens)}

    def chunks(self, stream: Stream) -> Iterator[Object]:
        begun: set[int] = set()
        try:
            for event in stream:
                yield self.envelope([self.delta(event, event.choice not in begun)], True)
                begun.add(event.choice)
            if self.shows_usage:
                yield {**self.envelope([], True), "usage": _usage(stream.result())}
        finally:
            stream.cancel()

    def delta(self, event: Event, is_first: bool) -> Object:
        shown: Object = {"index": event.choice, "finish_reason": event.finish_reason}
        shown["logprobs"] = self.logprobs(event.tokens) if event.tokens else None
        if not self.is_chat:
            return {**shown, "text": event.text}
        delta: Object = {"role": "assistant"} if is_first else {}
        if event.kind == "text":
            delta["content"] = event.text
        elif event.kind == "reasoning":
            delta["reasoning"] = event.text
        elif event.kind == "tool_call":
            function = {"name": event.name, "arguments": ""}
            delta["tool_calls"] = [{"index": event.index, "id": event.id, "type": "function", "function": function}]
        elif event.kind == "tool_arguments":
            delta["tool_calls"] = [{"index": event.index, "function": {"arguments": event.text}}]
        return {**shown, "delta": delta}

    def logprobs(self, tokens: Sequence[Token]) -> Object | None:
        if not self.shows_logprobs:
            return None
        name = self.name()
        if self.is_chat:
            return {
                "content": [
                    {
                        **_named(name(token.id), token.logprob),
                        "top_logprobs": [_named(name(id), logprob) for id, logprob in token.top],
                    }
                    for token in tokens
                ]
            }
        return {
            "tokens": [name(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{name(id): p for id, p in token.top} for token in tokens],
        }

    def name(self) -> Callable[[int], str]:
        known: dict[int, str] = {}

        def name(id: int) -> str:
            if id not in known:
                known[id] = self.engine.detokenize([id])
            return known[id]

        return name


def _named(text: str, logprob: float | None) -> Object:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _usage(result: Result) -> Object:
    usage = result.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
