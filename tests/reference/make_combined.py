#!/usr/bin/env python3
"""Makes tests/fixtures/combined-adapters: what peft computes with adapters that add_weighted_adapter combined.

golden.json holds a list of cases: the adapters with their weights, combination_type and density, and for each prompt
the ids, greedy ids and the logits at the last position of the prompt (`last_logits`, 7 digits), computed in float32 on
the CPU with the combined adapter, not merged. The adapters are those of other fixtures, and three small ones of
float32 that are made here, with random factors for embed_tokens, lm_head, k_proj and o_proj.

Which of several equally large numbers stay when ties trims a factor is up to torch.topk. So no number that is left out
may be as large as one that stays, which rules out most adapters of float16.

The first adapter of a case never uses rslora: peft 0.21 gives the combined adapter the configuration of the first one
with lora_alpha = r, so with use_rslora it would multiply the combined change by sqrt(r).

    python3 -m venv venv && venv/bin/pip install -r tests/reference/adapters.txt
    venv/bin/python tests/reference/make_combined.py tests/fixtures

The same machine writes the same bytes again. Another one may differ in the last digits of the logits.
"""

import json
import platform
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import make_adapters
import torch
from make_adapters import CONFIG, WEIGHTS, digits, fill, last_logits, load_base
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer

BASE = "llama-gqa"
PROMPTS = ["Once upon a time", "def main():\n    print("]
GREEDY = 8
MARGIN = 0.003
QV, RSLORA = "lora-llama-gqa/r8-qv", "adapters/rslora"
A, B, THIRD = "combined-adapters/a", "combined-adapters/b", "combined-adapters/c"

# Adapters with weights, combination_type, density.
CASES = [
    ({QV: 0.75, RSLORA: 1.0}, "cat", None),
    ({QV: 0.75, RSLORA: 1.0}, "linear", None),
    ({QV: 1.0, RSLORA: -0.5}, "linear", None),
    ({QV: 0.5, RSLORA: 2.0}, "ties", 1.0),
    ({A: 1.0, B: 0.5}, "linear", None),
    ({A: 1.0, B: 0.75}, "ties", 0.2),
    ({A: 0.5, B: 1.5}, "ties", 0.5),
    ({A: 1.0, B: -1.0}, "ties", 0.37),
    ({A: 1.0, B: 1.0, THIRD: 0.5}, "ties", 0.8),
]


def make_adapter(fixtures, name, seed, **config):
    """An adapter with factors of rank 3, without the weights of the embeddings."""
    folder = fixtures / name
    config = LoraConfig(task_type="CAUSAL_LM", r=3, **config)
    model = get_peft_model(load_base(fixtures / BASE), config)
    fill(model, seed)
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    saved = json.loads((folder / CONFIG).read_text())
    saved["target_modules"].sort()
    saved["base_model_name_or_path"] = BASE
    (folder / CONFIG).write_text(json.dumps(saved, indent=2) + "\n")


def greedy(model, ids):
    ids = list(ids)
    for _ in range(GREEDY):
        values, best = last_logits(model, ids).topk(2)
        assert values[0] - values[1] > MARGIN, "a greedy choice is not clear; choose other weights"
        ids.append(int(best[0]))
    return ids[-GREEDY:]


def assert_clear(folder, density):
    """Checks that the numbers that stay are larger than those that do not."""
    for name, tensor in load_file(folder / WEIGHTS).items():
        kept = int(density * tensor.numel())
        largest = tensor.float().abs().flatten().sort(descending=True).values
        assert kept == tensor.numel() or largest[kept - 1] > largest[kept], (folder, name)


def golden(fixtures, adapters, how, density):
    base, tokenizer = load_base(fixtures / BASE), Tokenizer.from_file(str(fixtures / BASE / "tokenizer.json"))
    names = [f"adapter{i}" for i in range(len(adapters))]
    folders = [fixtures / folder for folder in adapters]
    for folder in folders:
        assert_clear(folder, 1.0 if density is None else density)
    model = PeftModel.from_pretrained(base, folders[0], adapter_name=names[0])
    for name, folder in zip(names[1:], folders[1:]):
        model.load_adapter(folder, adapter_name=name)
    more = {} if density is None else {"density": density}
    model.add_weighted_adapter(names, list(adapters.values()), "combined", combination_type=how, **more)
    model.set_adapter("combined")
    model.eval()
    prompts = []
    for text in PROMPTS:
        ids = tokenizer.encode(text).ids
        logits = [digits(value) for value in last_logits(model, ids).tolist()]
        prompts.append({"text": text, "ids": ids, "greedy_ids": greedy(model, ids), "last_logits": logits})
    merge = how if density is None else f"{how}:{density}"
    return {"adapters": [[name, weight] for name, weight in adapters.items()], "merge": merge, "prompts": prompts}


def main(fixtures):
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    warnings.simplefilter("ignore")
    make_adapters.logging.set_verbosity_error()
    make_adapters.logging.disable_progress_bar()
    fixtures = Path(fixtures)
    targets = ["embed_tokens", "lm_head", "k_proj"]
    make_adapter(fixtures, A, 1, lora_alpha=2, target_modules=targets, alpha_pattern={"k_proj": 7})
    make_adapter(fixtures, B, 2, lora_alpha=4, target_modules=[*targets, "o_proj"], use_rslora=True)
    make_adapter(fixtures, THIRD, 3, lora_alpha=6, target_modules=["k_proj", "o_proj"])
    packages = ["transformers", "torch", "peft", "tokenizers", "safetensors"]
    result = {
        "format": "iec-combined-adapters-golden-1",
        "base": BASE,
        "versions": {name: version(name) for name in packages} | {"python": platform.python_version()},
        "cases": [golden(fixtures, *case) for case in CASES],
    }
    text = json.dumps(result, ensure_ascii=False, separators=(",", ":"))
    (fixtures / "combined-adapters" / "golden.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
