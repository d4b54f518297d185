#!/usr/bin/env python3
"""Checks answers against their JSON schemas with the Python package `jsonschema`, which shares no code with iec
(`pip install 'jsonschema[format-nongpl]'`).

    scripts/check-schemas.py FILE...

Each line of a file is an object: `{"schema": SCHEMA, "answer": TEXT}`. `cargo test --test it -- answers_to_300` writes
such a file to target/tmp/schemas.jsonl. Exit code 1 if an answer is not valid.
"""

import json
import sys

from jsonschema.validators import validator_for


def problem(schema, answer):
    """Returns why an answer is not valid, or None."""
    kind = validator_for(schema)
    kind.check_schema(schema)
    try:
        value = json.loads(answer)
    except ValueError as e:
        return f"not JSON: {e}"
    error = next(kind(schema, format_checker=kind.FORMAT_CHECKER).iter_errors(value), None)
    return error and error.message


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    checked, wrong = 0, 0
    for path in sys.argv[1:]:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                row = json.loads(line)
                why = problem(row["schema"], row["answer"])
                checked += 1
                if why:
                    wrong += 1
                    print(f"{path}:{number}: {why}\n  {row['answer']}", file=sys.stderr)
    print(f"{checked - wrong} of {checked} answers are valid")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
