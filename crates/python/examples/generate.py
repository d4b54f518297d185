"""Continues texts with a model, together, and shows one answer while it is generated: generate.py [MODEL]."""

from __future__ import annotations

import sys

import iec


def main(arguments: list[str]) -> None:
    with iec.Engine(arguments[0]) if arguments else iec.Engine.embedded() as engine:
        careful = iec.Sampling(max_tokens=32, temperature=0)
        results = engine.generate(["Once upon a time", "The dog"], careful)
        for result in results:
            print(result.text.strip(), f"({result.usage.completion_tokens} tokens, {result.finish_reason})")
        for event in engine.chat_stream("Lily and Tom", careful):
            print(event.text, end="", flush=True)
        print()
        logits = engine.logits(engine.tokenize("Once upon a"))
        print("next:", engine.detokenize([int(logits[-1].argmax())]))


if __name__ == "__main__":
    main(sys.argv[1:])
