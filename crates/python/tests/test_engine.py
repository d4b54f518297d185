"""Tests of the package with the embedded model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import iec

STORY = ", there was a little girl named Lily. She loved to play outside in the park."
MODEL = Path(__file__).parents[3] / "assets/stories260k"


@pytest.fixture(scope="module")
def engine() -> Iterator[iec.Engine]:
    with iec.Engine.embedded(threads=1, device="cpu") as engine:
        yield engine


def greedy(tokens: int = 40) -> iec.Sampling:
    return iec.Sampling(max_tokens=tokens, temperature=0.0)


def test_one_text_and_lists(engine: iec.Engine) -> None:
    result = engine.generate("Once upon a time", greedy(60))
    assert result.text.startswith(STORY) and result.finish_reason == "length"
    ids = engine.tokenize("Once upon a time")
    assert engine.generate(ids, greedy(60)).token_ids == result.token_ids
    both = engine.generate(["Once upon a time", "The dog"], greedy(60))
    assert [one.token_ids for one in both] == [result.token_ids, engine.generate("The dog", greedy(60)).token_ids]
    assert engine.detokenize(ids, True).endswith("Once upon a time")
    assert engine.generate([ids, ids], greedy(3))[1].token_ids == result.token_ids[:3]


def test_streams_are_the_answer(engine: iec.Engine) -> None:
    fields = dict(max_tokens=30, seed=4, temperature=1.0, n=2, logprobs=2)
    whole = engine.generate("The sun", **fields)
    stream = engine.stream("The sun", **fields)
    texts = ["", ""]
    for event in stream:
        texts[event.choice] += event.text
    assert texts == [choice.text for choice in whole.choices]
    assert stream.result().choices == whole.choices
    assert all(len(token.top) == 2 and token.logprob is not None for token in whole.choices[0].tokens)


def test_the_best_of_several_texts(engine: iec.Engine) -> None:
    fields = dict(max_tokens=12, seed=5, temperature=1.2, logprobs=0)
    every = engine.generate("The cat", n=6, **fields)
    best = engine.generate("The cat", n=2, best_of=6, **fields)
    means = sorted((sum(token.logprob or 0.0 for token in one.tokens) for one in every.choices), reverse=True)
    assert [sum(token.logprob or 0.0 for token in one.tokens) for one in best.choices] == means[:2]


def test_conversations(engine: iec.Engine) -> None:
    result = engine.chat("Once upon a time", greedy(60))
    assert result.text.startswith(STORY.strip())
    messages = [{"role": "user", "content": "Once upon a time"}]
    assert engine.chat([messages, "Once upon a time"], greedy(60))[1].text == result.text
    assert engine.prompt_ids(messages) == engine.tokenize("Once upon a time")


def test_numbers(engine: iec.Engine) -> None:
    ids = engine.tokenize("Once upon a time, there was a dog.")
    logits = engine.logits(ids)
    assert logits.shape == (len(ids), 512) and logits.dtype == np.float32
    assert logits.base is not None and not logits.flags.writeable and not logits.flags.owndata
    wide = logits.astype(np.float64)
    scores = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    for at, token in enumerate(engine.score(ids, top=1)):
        assert token.id == ids[at + 1]
        assert token.logprob == pytest.approx(scores[at, ids[at + 1]], abs=1e-9)
        assert token.top[0][0] == int(logits[at].argmax())
    assert engine.hidden_states(ids).shape == (len(ids), 64)
    vectors = engine.embed(["a dog", "a cat"], pooling="mean")
    assert vectors.shape == (2, 64)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1)
    assert np.array_equal(engine.embed("a cat", pooling="mean"), vectors[1])


def test_errors_have_the_codes_of_the_program(engine: iec.Engine) -> None:
    with pytest.raises(iec.UsageError, match="tempreature") as caught:
        engine.generate("a", tempreature=1)
    assert caught.value.code == 2 and isinstance(caught.value, ValueError)
    with pytest.raises(iec.UsageError):
        engine.generate("a", temperature=float("nan"))
    with pytest.raises(iec.UsageError):
        engine.generate([])  # no token
    with pytest.raises(iec.ModelError):
        iec.Engine("/no/such/model")
    with pytest.raises(iec.UsageError, match="thread"):
        iec.Engine.embedded(thread=1)
    with pytest.raises(iec.UsageError):
        engine.embed("a", pooling="max")
    closed = iec.Engine.embedded(threads=1)
    closed.close()
    closed.close()
    with pytest.raises(iec.EngineError, match="closed"):
        closed.generate("a")


def test_cancelled_streams_end(engine: iec.Engine) -> None:
    stream = engine.stream("Once", max_tokens=400, ignore_eos=True)
    next(stream)
    stream.cancel()
    assert stream.result().finish_reason == "cancelled"
    with engine.stream("Once", max_tokens=400, ignore_eos=True) as stream:
        next(stream)
    deadline = time.time() + 60
    while engine.metrics()["running"]:
        assert time.time() < deadline
        time.sleep(0.01)


def test_threads(engine: iec.Engine) -> None:
    expected = [engine.generate("The moon", max_tokens=20, seed=seed).token_ids for seed in range(8)]
    found: list[list[int] | None] = [None] * 8

    def work(seed: int) -> None:
        for _ in range(3):
            found[seed] = engine.generate("The moon", max_tokens=20, seed=seed).token_ids

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert found == expected


def test_tasks(engine: iec.Engine) -> None:
    async def run() -> None:
        tasks = iec.AsyncEngine(engine)
        results = await asyncio.gather(*(tasks.generate("Once upon a time", greedy(60)) for _ in range(5)))
        assert all(result.text.startswith(STORY) for result in results)
        text = ""
        async for event in tasks.chat_stream("Once upon a time", greedy(60)):
            text += event.text
        assert text.startswith(STORY.strip())
        task = asyncio.create_task(tasks.generate("Once", max_tokens=490, ignore_eos=True))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async for _ in tasks.stream("Once", max_tokens=490, ignore_eos=True):
            break

    asyncio.run(run())


def test_ctrl_c_ends_a_call(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import iec, signal
        # Background processes of a shell ignore the signal.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        engine = iec.Engine.embedded(threads=1)
        print("ready", flush=True)
        try:
            while True:
                engine.generate("Once", max_tokens=480, ignore_eos=True)
        except KeyboardInterrupt:
            print("interrupted", engine.generate("Once", max_tokens=2).usage.completion_tokens, flush=True)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=120)[0] == "interrupted 2\n"


def test_a_forked_process_opens_its_own_engine(engine: iec.Engine) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            engine.generate("a")
        except iec.EngineError as error:
            os._exit(7 if "forked" in str(error) else 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_conversions(tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    pack = tmp_path / "pack"

    class Stop(Exception):
        pass

    def stop(label: str, done: int, total: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        iec.pack(MODEL, pack, bits=8, progress=stop)
    assert not (pack / "model.ie.json").exists()
    summary = iec.pack(MODEL, pack, bits=8, progress=lambda *step: steps.append(step))
    assert summary["quantized_tensors"] > 0 and steps
    assert iec.verify(pack)["differences"] == []
    assert iec.inspect(pack)["architecture"] == "LlamaForCausalLM"
    iec.ptq(MODEL, tmp_path / "manifest.json", bits=4)
    assert json.loads((tmp_path / "manifest.json").read_text())["version"]
    with pytest.raises(iec.UsageError):
        iec.pack(MODEL, pack, bits=8)
    with pytest.raises(iec.UsageError, match="bit"):
        iec.pack(MODEL, tmp_path / "other", bit=8)
    with iec.Engine(pack, threads=1) as engine:
        assert engine.describe()["family"] == "llama"


def test_engines_are_opened_and_closed_without_growth() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    def cycle() -> None:
        with iec.Engine.embedded(threads=1) as engine:
            engine.generate("a", max_tokens=1)

    for _ in range(20):
        cycle()
    before = resident()
    for _ in range(80):
        cycle()
    # An engine of this model has some 3 MB.
    assert resident() - before < 64 << 20
