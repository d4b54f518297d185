"""The engine: an opened model that answers requests of any number of threads and tasks."""

from __future__ import annotations

import asyncio
import json
import operator
import os
import sysconfig
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from . import _iec
from .errors import UsageError
from .results import Event, Result, Sampling, Token, event_of, result_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["AsyncEngine", "Engine", "Stream"]

Messages = str | Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int]
T = TypeVar("T")

# Largest number of requests of a list that are in the engine at a time.
_MOST_REQUESTS = 256


def _program() -> str | None:
    """Path of the program of this package, which renders chat templates in a process of limited memory."""
    path = os.path.join(sysconfig.get_path("scripts"), "iec")
    return path if os.access(path, os.X_OK) else None


def _options(options: Mapping[str, Any]) -> str:
    def plain(value: object) -> object:
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        raise TypeError(f"found a value of the type {type(value).__name__}, expected one that JSON has")

    return json.dumps(options, default=plain)


def _body(first: Mapping[str, Any], sampling: Sampling | None, fields: Mapping[str, Any]) -> str:
    try:
        return json.dumps({**(sampling.fields() if sampling else {}), **fields, **first}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the request has a value that JSON has not: {error}") from error


def _is_many(prompt: object) -> bool:
    return not isinstance(prompt, str) and isinstance(prompt, Sequence) and not all(isinstance(one, int) for one in prompt)


def _ids(ids: Sequence[int]) -> list[int]:
    """Token ids as numbers of Python: those of numpy are none for JSON."""
    try:
        return [operator.index(one) for one in ids]
    except TypeError as error:
        raise UsageError(f"found a value that is no token id: {error}") from error


def _messages(messages: Messages) -> list[Mapping[str, Any]]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)


def _array(matrix: _iec.Matrix) -> npt.NDArray[np.float32]:
    import numpy

    return numpy.asarray(matrix)


class Stream:
    """Iterator over the events of an answer. Leaving it, or ``cancel``, cancels the request.

    ``result()`` reads the rest and returns the whole answer.
    """

    def __init__(self, native: _iec.NativeStream) -> None:
        self._native = native
        self._ready: list[Event] = []
        self._over = False

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if not self._ready and not self._over:
            events = self._native.next_events() or []
            self._over = not events
            self._ready = [event_of(parts) for parts in reversed(events)]
        if not self._ready:
            raise StopIteration
        return self._ready.pop()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Cancels the request: choices that have not ended end with the reason cancelled."""
        self._native.cancel()

    def result(self) -> Result:
        """Reads the rest of the events, and returns the whole answer."""
        self._native.skip()
        return result_of(self._native.answer())


def _results(streams: Iterator[Stream]) -> list[Result]:
    """Reads streams together, in windows, and returns their answers in order.

    The engine pauses a text of which many events wait. Texts that are read one after the other would not be computed
    together.
    """
    begun = enumerate(streams)
    running: dict[int, Stream] = {}
    results: dict[int, Result] = {}
    try:
        while True:
            running.update(islice(begun, _MOST_REQUESTS - len(running)))
            if not running:
                return [results[at] for at in range(len(results))]
            # Waits for the first, and takes what is there of the others.
            seconds = 0.01
            for at, stream in list(running.items()):
                if stream._native.skip(seconds):
                    results[at] = result_of(stream._native.answer())
                    del running[at]
                seconds = 0.0
    finally:
        for stream in running.values():
            stream.cancel()


class Engine:
    """An opened model.

    ``path`` is a pack, a checkpoint directory, a GGUF file, or ``ORG/NAME`` of a downloaded model; options have the names
    of the program: ``threads``, ``context``, ``precision``, ``kv``, ``kv_memory``, ``device``, ``gpu_layers``,
    ``max_seqs``, ``prefix_cache``, ``adapters``, ``speculate``, ``draft_model``, ``chat_template``, ``check``.

    >>> with Engine.embedded(threads=1) as engine:
    ...     engine.generate("Once upon a time", max_tokens=8, temperature=0).text
    ', there was a little girl'
    """

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        self._native = _iec.NativeEngine(os.fspath(path), _options(options), _program())

    @classmethod
    def embedded(cls, **options: Any) -> Engine:
        """Opens the small model that is embedded in the package, for examples and tests."""
        engine = cls.__new__(cls)
        engine._native = _iec.NativeEngine(None, _options(options), _program())
        return engine

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(0.0)

    def close(self, seconds: float = 0.0) -> None:
        """Finishes all requests, at the longest for ``seconds``, and frees the model."""
        self._native.close(seconds)

    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload]
        self, prompt: Prompt, sampling: Sampling | None = ..., **fields: Any
    ) -> Result: ...
    @overload
    def generate(self, prompt: Sequence[Prompt], sampling: Sampling | None = ..., **fields: Any) -> list[Result]: ...
    def generate(
        self, prompt: Prompt | Sequence[Prompt], sampling: Sampling | None = None, **fields: Any
    ) -> Result | list[Result]:
        """Continues a text or token ids; of a list of them, each on its own, in the same steps of the model."""
        fields["stream"] = False
        if _is_many(prompt):
            return _results(self.stream(one, sampling, **fields) for one in prompt)  # type: ignore[arg-type]
        return self.stream(prompt, sampling, **fields).result()  # type: ignore[arg-type]

    def stream(self, prompt: Prompt, sampling: Sampling | None = None, **fields: Any) -> Stream:
        """Continues a text or token ids; returns an iterator of events.

        >>> with Engine.embedded(threads=1) as engine:
        ...     "".join(event.text for event in engine.stream("Once upon a time", max_tokens=8, temperature=0))
        ', there was a little girl'
        """
        prompt = prompt if isinstance(prompt, str) else _ids(prompt)
        return Stream(self._native.stream(False, _body({"prompt": prompt}, sampling, fields)))

    @overload
    def chat(  # pyright: ignore[reportOverlappingOverload]
        self, messages: Messages, sampling: Sampling | None = ..., **fields: Any
    ) -> Result: ...
    @overload
    def chat(self, messages: Sequence[Messages], sampling: Sampling | None = ..., **fields: Any) -> list[Result]: ...
    def chat(self, messages: Any, sampling: Sampling | None = None, **fields: Any) -> Result | list[Result]:
        """Answers a conversation: a text of the user, or messages with ``role`` and ``content``; or a list of those."""
        fields["stream"] = False
        if not isinstance(messages, str) and messages and not isinstance(messages[0], Mapping):
            return _results(self.chat_stream(one, sampling, **fields) for one in messages)
        return self.chat_stream(messages, sampling, **fields).result()

    def chat_stream(self, messages: Messages, sampling: Sampling | None = None, **fields: Any) -> Stream:
        """Answers a conversation; returns an iterator of events."""
        return Stream(self._native.stream(True, _body({"messages": _messages(messages)}, sampling, fields)))

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encodes a text."""
        return self._native.tokenize(text, add_special_tokens)

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Decodes token ids."""
        return self._native.detokenize(list(ids), skip_special_tokens)

    def prompt_ids(self, messages: Messages, **fields: Any) -> list[int]:
        """Returns the token ids of the prompt of a conversation."""
        return self._native.prompt_ids(True, _body({"messages": _messages(messages)}, None, fields))

    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Computes the logits behind each token: a read-only array (tokens, vocabulary) over the library's memory."""
        return _array(self._native.logits(list(ids)))

    def hidden_states(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Computes the output of the final norm for each token: a read-only array (tokens, hidden size)."""
        return _array(self._native.hidden_states(list(ids)))

    def embed(self, text: str | Sequence[str], pooling: str = "last") -> npt.NDArray[np.float32]:
        """Computes a vector of length 1 for a text, or a row for each of several; ``pooling`` is last or mean."""
        import numpy

        if isinstance(text, str):
            vector: npt.NDArray[np.float32] = _array(self._native.embed(text, pooling))[0]
            return vector
        rows = [_array(self._native.embed(one, pooling)) for one in text]
        return numpy.concatenate(rows) if rows else numpy.zeros((0, 0), numpy.float32)

    @overload
    def score(  # type: ignore[overload-overlap]  # pyright: ignore[reportOverlappingOverload]
        self, prompt: Prompt, top: int = ...
    ) -> list[Token]: ...
    @overload
    def score(self, prompt: Sequence[Prompt], top: int = ...) -> list[list[Token]]: ...
    def score(self, prompt: Prompt | Sequence[Prompt], top: int = 0) -> list[Token] | list[list[Token]]:
        """Computes the log-probability of each token but the first, and the ``top`` most likely tokens at its place.

        A list of texts or token ids is computed together; the result is a list of such lists.
        """
        fields: dict[str, Any] = {"max_tokens": 0, "echo": True, "logprobs": top}
        prompts = list(prompt) if _is_many(prompt) else [prompt]
        results = _results(self.stream(one, None, **fields) for one in prompts)  # type: ignore[arg-type]
        scores = [result.choices[0].prompt_tokens for result in results]
        return scores if _is_many(prompt) else scores[0]

    def load_adapter(self, name: str, path: str | os.PathLike[str], scale: float = 1.0) -> None:
        """Loads an adapter (LoRA or DoRA of PEFT), which requests name in ``adapters``."""
        self._native.load_adapter(name, os.fspath(path), scale)

    def unload_adapter(self, name: str) -> None:
        """Removes an adapter that no request uses."""
        self._native.unload_adapter(name)

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters that requests may name."""
        return self._native.adapters()

    def metrics(self) -> dict[str, Any]:
        """Returns the counters of the engine."""
        return dict(json.loads(self._native.metrics()))

    def prometheus(self) -> str:
        """Returns all counters and histograms in the text format of Prometheus."""
        return self._native.prometheus()

    def describe(self) -> dict[str, Any]:
        """Describes the model: family, context, sizes, whether it has a chat template."""
        return dict(json.loads(self._native.describe()))


class AsyncEngine:
    """An engine for asyncio. A task that is cancelled cancels its request.

    >>> async def story() -> str:
    ...     async with AsyncEngine(Engine.embedded(threads=1)) as engine:
    ...         return (await engine.generate("Once upon a time", max_tokens=8, temperature=0)).text
    >>> asyncio.run(story())
    ', there was a little girl'
    """

    def __init__(self, engine: Engine | str | os.PathLike[str], max_waiting: int = 64, **options: Any) -> None:
        self.engine = engine if isinstance(engine, Engine) else Engine(engine, **options)
        # Threads that wait for events; they compute nothing.
        self._threads = ThreadPoolExecutor(max_waiting, thread_name_prefix="iec-wait")

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, seconds: float = 0.0) -> None:
        """Finishes all requests, at the longest for ``seconds``, and frees the model."""
        await self._run(lambda: self.engine.close(seconds))
        self._threads.shutdown(wait=False)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _events(self, begin: Callable[[], Stream]) -> AsyncIterator[Event]:
        stream = await self._run(begin)
        try:
            while events := await self._run(lambda: stream._native.next_events()):
                for parts in events:
                    yield event_of(parts)
        finally:
            stream.cancel()

    async def _result(self, begin: Callable[[], Stream]) -> Result:
        stream = await self._run(begin)
        try:
            return await self._run(stream.result)
        except asyncio.CancelledError:
            stream.cancel()
            raise

    async def generate(self, prompt: Prompt, sampling: Sampling | None = None, **fields: Any) -> Result:
        """Continues a text or token ids."""
        fields["stream"] = False
        return await self._result(lambda: self.engine.stream(prompt, sampling, **fields))

    def stream(self, prompt: Prompt, sampling: Sampling | None = None, **fields: Any) -> AsyncIterator[Event]:
        """Continues a text or token ids; yields events."""
        return self._events(lambda: self.engine.stream(prompt, sampling, **fields))

    async def chat(self, messages: Messages, sampling: Sampling | None = None, **fields: Any) -> Result:
        """Answers a conversation."""
        fields["stream"] = False
        return await self._result(lambda: self.engine.chat_stream(messages, sampling, **fields))

    def chat_stream(self, messages: Messages, sampling: Sampling | None = None, **fields: Any) -> AsyncIterator[Event]:
        """Answers a conversation; yields events."""
        return self._events(lambda: self.engine.chat_stream(messages, sampling, **fields))
