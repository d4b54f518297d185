"""The model class for lm-evaluation-harness beside a reference from logits. Skipped without the harness."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import iec

pytest.importorskip("lm_eval")
from iec.lm_eval import IecLM  # noqa: E402

LARGEST_DIFFERENCE = 1e-3
QUESTIONS = [
    ("Once upon a time there was a little", [" girl", " boy", " dog", " king of the sea"]),
    ("Lily and Tom went to the ", ["park", "beach to play", "moon"]),
    ('"Can I play with you?" asked', [" Lily", " the bird.", " Tom and his mom"]),
]
STORY = (Path(__file__).parents[3] / "tests/text/tinystories_valid_30k.txt").read_text()


@pytest.fixture(scope="module")
def model() -> Iterator[IecLM]:
    model = IecLM(threads=1, device="cpu")
    yield model
    model.engine.close()


def asked(*args: Any) -> Any:
    return SimpleNamespace(args=args)


def logprobs(engine: iec.Engine, ids: list[int]) -> np.ndarray[Any, Any]:
    """Log-probabilities of all tokens behind each token, in f64."""
    wide = engine.logits(ids).astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


def reference(engine: iec.Engine, context: str, continuation: str) -> tuple[float, bool]:
    """Log-likelihood of a continuation with the boundary of the model `hf`: the tokens of the whole text behind as many
    as the context has, whose last spaces belong to the continuation."""
    spaces = len(context) - len(context.rstrip())
    whole = engine.tokenize(context + continuation) if context else [1, *engine.tokenize(continuation, False)]
    begin = len(engine.tokenize(context[: len(context) - spaces])) if context else 1
    rows = logprobs(engine, whole)
    picked = [(rows[at - 1, whole[at]], rows[at - 1].argmax() == whole[at]) for at in range(begin, len(whole))]
    return float(sum(one for one, _ in picked)), all(is_best for _, is_best in picked)


def test_continuations(model: IecLM) -> None:
    pairs = [(context, one) for context, continuations in QUESTIONS for one in continuations]
    pairs += [("", "Once upon a time"), ("", "The dog was happy.")]
    found = model.loglikelihood([asked(*pair) for pair in pairs], disable_tqdm=True)
    expected = [reference(model.engine, *pair) for pair in pairs]
    for pair, (logprob, is_greedy), (wanted, is_best) in zip(pairs, found, expected, strict=True):
        assert abs(logprob - wanted) < LARGEST_DIFFERENCE and is_greedy == is_best, pair
    assert any(is_greedy for _, is_greedy in found) and not all(is_greedy for _, is_greedy in found)


def test_texts_of_the_length_of_the_context_and_beyond(model: IecLM) -> None:
    ids = model.tok_encode(STORY[:3500])
    assert len(ids) > 700
    for length in (511, 512, 513, 700):
        whole = ids[:length]
        (logprob, _), = model._loglikelihood_tokens([(None, whole[:-3], whole[-3:])])
        seen = whole[-513:]
        rows = logprobs(model.engine, seen[:-1])
        wanted = sum(float(rows[at - 1, seen[at]]) for at in range(len(seen) - 3, len(seen)))
        assert abs(logprob - wanted) < LARGEST_DIFFERENCE, length


def test_whole_texts_in_windows(model: IecLM) -> None:
    # The longer one has more bytes than a prompt may have.
    short, long = "Once upon a time, there was a dog.", STORY[:9000]
    found = model.loglikelihood_rolling([asked(short), asked(long)])
    ids = model.tok_encode(short)
    # The harness puts the token of the beginning before texts that have one already.
    rows = logprobs(model.engine, [1, *ids])
    wanted = sum(float(rows[at, token]) for at, token in enumerate(ids))
    assert abs(found[0] - wanted) < LARGEST_DIFFERENCE
    # Windows of 512 predicted tokens; the last one has as much context as it can hold.
    ids = [1, *model.tok_encode(long)]
    predicted = 1
    wanted = 0.0
    while predicted < len(ids):
        end = min(predicted + 512, len(ids))
        begin = max(0, end - 513) if predicted > 1 else 0
        rows = logprobs(model.engine, ids[begin : end - 1])
        wanted += sum(float(rows[at - begin - 1, ids[at]]) for at in range(predicted, end))
        predicted = end
    assert len(ids) > 2048 and abs(found[1] - wanted) < LARGEST_DIFFERENCE


def test_answers_end_before_stop_texts(model: IecLM) -> None:
    kwargs = {"until": ["."], "max_gen_toks": 24, "do_sample": False}
    many = {"until": [f"x{at}" for at in range(20)] + ["girl"], "max_gen_toks": 24, "do_sample": False}
    first, second = model.generate_until([asked("Once upon a time", kwargs), asked("Once upon a time", many)])
    whole = model.engine.generate("Once upon a time", max_tokens=24, temperature=0).text
    assert first == whole.split(".")[0] and second == whole.split("girl")[0]


def test_the_program_of_the_harness(model: IecLM, tmp_path: Path) -> None:
    rows = [{"query": query, "choices": choices, "label": 0} for query, choices in QUESTIONS]
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "stories.yaml").write_text(
        f"""
task: stories
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{query}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
    )
    arguments = ["--model", "iec", "--model_args", "threads=1", "--tasks", "stories", "--include_path", str(tmp_path)]
    arguments += ["--log_samples", "--output_path", str(tmp_path / "out"), "--device", "cpu"]
    command = [sys.executable, "-m", "iec.lm_eval", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    logged = [json.loads(line) for line in samples.read_text().splitlines()]
    for sample in sorted(logged, key=lambda sample: sample["doc_id"]):
        query, choices = QUESTIONS[sample["doc_id"]]
        for choice, answer in zip(choices, sample["filtered_resps"], strict=True):
            wanted = reference(model.engine, query, choice)[0]
            assert abs(float(answer[0]) - wanted) < LARGEST_DIFFERENCE, (query, choice)
    assert len(logged) == len(QUESTIONS)
