"""Tests of the dictionaries in OpenAI's form, and of lists."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import iec
from iec import openai

GREEDY: dict[str, Any] = {"max_tokens": 40, "temperature": 0}


@pytest.fixture(scope="module")
def engine() -> Iterator[iec.Engine]:
    with iec.Engine.embedded(threads=1, device="cpu") as engine:
        yield engine


def test_completions(engine: iec.Engine) -> None:
    prompts = ["Once upon a time", "The dog"]
    expected = [engine.generate(prompt, **GREEDY) for prompt in prompts]
    answer = openai.create_completion(engine, prompts, logprobs=2, model="stories", **GREEDY)
    assert answer["object"] == "text_completion" and answer["model"] == "stories" and answer["id"].startswith("cmpl-")
    for at, (choice, result) in enumerate(zip(answer["choices"], expected, strict=True)):
        assert (choice["index"], choice["text"], choice["finish_reason"]) == (at, result.text, "length")
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 40
        assert all(len(top) == 2 for top in logprobs["top_logprobs"])
    assert answer["usage"]["completion_tokens"] == 80
    assert answer["usage"]["total_tokens"] == 80 + answer["usage"]["prompt_tokens"]


def test_chunks_join_to_the_answer(engine: iec.Engine) -> None:
    text = engine.chat("Once upon a time", **GREEDY).text
    options = {"stream_options": {"include_usage": True}}
    chunks = list(openai.create_chat_completion(engine, "Once upon a time", stream=True, **options, **GREEDY))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0]["role"] == "assistant" and not any("role" in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == text
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-3:-1]] == [None, "length"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 40


def test_conversations(engine: iec.Engine) -> None:
    messages = [{"role": "user", "content": "Once upon a time"}]
    answer = openai.create_chat_completion(engine, messages, logprobs=True, top_logprobs=1, **GREEDY)
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": engine.chat(messages, **GREEDY).text}
    content = choice["logprobs"]["content"]
    assert len(content) == 40 and all(one["top_logprobs"][0]["token"] == one["token"] for one in content)
    assert all(bytes(one["bytes"]).decode() == one["token"] for one in content)


def test_wrong_fields_raise_before_the_first_chunk(engine: iec.Engine) -> None:
    with pytest.raises(iec.UsageError, match="tempreature"):
        openai.create_completion(engine, "a", stream=True, tempreature=1)
    with pytest.raises(iec.UsageError, match="stream_options"):
        openai.create_completion(engine, "a", stream=True, stream_options={"usage": True})


def test_chunks_that_are_not_read_cancel_the_request(engine: iec.Engine) -> None:
    chunks = openai.create_completion(engine, "Once", stream=True, max_tokens=480, ignore_eos=True)
    next(chunks)
    del chunks
    assert engine.generate("a", max_tokens=1).usage.completion_tokens == 1
    deadline = time.time() + 60
    while engine.metrics()["running"]:
        assert time.time() < deadline
        time.sleep(0.01)


def test_long_lists_keep_their_order_and_their_answers(engine: iec.Engine) -> None:
    prompts = [[1, 300 + at % 100, 310] for at in range(300)]
    results = engine.generate(prompts, max_tokens=4, temperature=0)
    some = range(0, 300, 37)
    assert [results[at].token_ids for at in some] == [
        engine.generate(prompts[at], max_tokens=4, temperature=0).token_ids for at in some
    ]
    with pytest.raises(iec.UsageError, match="token id"):
        engine.generate([[1, 2], ["a"]])
    assert engine.generate("a", max_tokens=1).text is not None
    assert engine.metrics()["running"] == 0


def test_scores_of_lists_and_ids_of_numpy(engine: iec.Engine) -> None:
    ids = engine.tokenize("Once upon a time")
    both = engine.score([ids, "The dog"], top=2)
    assert both == [engine.score(ids, top=2), engine.score("The dog", top=2)]
    assert engine.score(np.array(ids)) == engine.score(ids)  # type: ignore[call-overload]
    event = next(iter(engine.stream(ids, max_tokens=3, temperature=0)))
    assert event.token_ids and event.token_ids[0] == engine.generate(ids, max_tokens=1, temperature=0).token_ids[0]
