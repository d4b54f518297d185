#!/usr/bin/env python3
"""Do transformers and compressed-tensors read what `iec export-hf` writes? Quantizes a small checkpoint, exports the
pack in each format, loads the result with transformers in float32 on the CPU, and compares its logits with those of
the floats that `iec unpack` decodes from the same pack, and with those of `iec run`.

    pip install torch==2.15.0 transformers==5.24.0 compressed-tensors==0.20.1 accelerate==1.15.0
    scripts/check-export-hf.py tests/fixtures/llama-gqa

Needs target/release/iec (or IEC). GPTQ needs the packages gptqmodel (7.7.0) and optimum (2.3.0) in addition, and is
skipped without them; its kernel multiplies in f16, so logits differ by some 1e-3. FP8 is decoded by transformers when
it loads the checkpoint, because its kernels need a GPU. The formats keep every number of the pack, so logits differ
from those of the unpacked floats by the order of sums only (below 1e-4); FP8 rounds, so its difference is just shown.
`iec run` multiplies codes by activations of 16 bits, which differs by less than 0.02. transformers 5.24 does not read
zero points in this format, not even those that the library has written, and decodes MXFP4 to bfloat16 whatever the type
of the model; these weights are decoded by the library alone, and compared.

On 2026-11-29, with these versions and tests/fixtures/llama-gqa, every export of compressed-tensors gave the logits or
weights of the floats bit for bit, GPTQ differed by 4e-3 (4 bits) and 7e-3 (8 bits), and FP8 by 0.7 of 7.4.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

IEC = os.environ.get("IEC", "target/release/iec")
PROMPT = "The quick brown fox"


def rule(scheme, group, symmetric=True):
    return [{"include": "proj", "scheme": scheme, "group_size": group, "symmetric": symmetric, "method": "rtn"}]


# Format, what is quantized, and the largest allowed difference of a logit.
CASES = [
    ("compressed-tensors", rule("int4", 32), 1e-4),
    ("compressed-tensors", rule("q4_0", 32), 1e-4),
    ("compressed-tensors", rule("int4", 32, symmetric=False), 1e-4),
    ("compressed-tensors", rule("int4", "row"), 1e-4),
    ("compressed-tensors", rule("int5", 32), 1e-4),
    ("compressed-tensors", rule("int8", "row"), 1e-4),
    ("compressed-tensors", rule("mxfp4", 32), 1e-4),
    ("gptq", rule("int4", 32), 2e-2),
    ("gptq", rule("int8", "row"), 2e-2),
    ("fp8", [], None),
]


def run(*words):
    done = subprocess.run([IEC, *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}: {done.stderr}")
    return done.stdout


def logits_of(folder, ids, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1].float()


def load_options(form):
    if form == "fp8":
        from transformers import FineGrainedFP8Config

        return {"quantization_config": FineGrainedFP8Config(dequantize=True)}
    return {}


def generate(pack, trace):
    """Writes the trace of one token in the precision with the most exact activations that the pack has."""
    words = ["run", "--model-dir", pack, "--prompt", PROMPT, "--max-new", 1, "--greedy", "--ignore-eos"]
    for precision in ("fp32", "int4w", "int8w"):
        more = ["--trace-ids", trace, "--precision", precision]
        done = subprocess.run([IEC, *map(str, words), *more], capture_output=True)
        if done.returncode == 0:
            return
    sys.exit(f"{pack} runs in none of the precisions")


def weights_differ(folder, floats):
    """Returns the largest difference of a weight that compressed-tensors decodes."""
    from compressed_tensors.compressors import MXFP4PackedCompressor, PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    coded, plain = ({}, {})
    for tensors, place in ((coded, folder), (plain, floats)):
        for file in place.glob("*.safetensors"):
            tensors.update(load_file(file))
    worst = 0.0
    for group in json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"].values():
        scheme = QuantizationScheme(targets=group["targets"], weights=group["weights"])
        for module in group["targets"]:
            state = {key[len(module) + 1 :]: value for key, value in coded.items() if key.startswith(module + ".")}
            is_integer = group["format"] == "pack-quantized"
            if is_integer:
                state["weight_scale"] = state["weight_scale"].float()
            compressor = PackedQuantizationCompressor if is_integer else MXFP4PackedCompressor
            found = compressor.decompress(state, scheme)["weight"].float()
            worst = max(worst, (found - plain[module + ".weight"]).abs().max().item())
    return worst


def check(checkpoint, form, rules, work):
    """Returns the largest differences of a logit from the unpacked floats and from `iec run`."""
    pack, floats, out, trace = (work / name for name in ("pack", "floats", "out", "trace.jsonl"))
    more = []
    if rules:
        (work / "rules.json").write_text(json.dumps({"version": 1, "rules": rules}))
        more = ["--q4-map", work / "rules.json"]
    run("pack", "--hf-dir", checkpoint, "--out-dir", pack, *more)
    run("unpack", "--model-dir", pack, "--out-dir", floats, "--dtype", "fp32")
    run("export-hf", "--format", form, "--model-dir", pack, "--out-dir", out)
    if not all(rule["symmetric"] and rule["scheme"] != "mxfp4" for rule in rules):
        return weights_differ(out, floats), None
    generate(pack, trace)
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    ids = next(line for line in lines if line["kind"] == "prompt")["prompt_token_ids"]
    step = next(line for line in lines if line["kind"] == "gen_step")
    found = logits_of(out, ids, **load_options(form))
    from_floats = (found - logits_of(floats, ids)).abs().max().item()
    from_run = (found[step["topk_ids"]] - torch.tensor(step["topk_logits"])).abs().max().item()
    return from_floats, from_run


def main(checkpoint):
    failed = False
    for form, rules, allowed in CASES:
        names = [f"{r['scheme']} {r['group_size']}{'' if r['symmetric'] else ' affine'}" for r in rules]
        what = " ".join(names) or "floats"
        if form == "gptq" and importlib.util.find_spec("gptqmodel") is None:
            print(f"{form:<19} {what:<16} skipped: gptqmodel is missing", flush=True)
            continue
        with tempfile.TemporaryDirectory() as work:
            from_floats, from_run = check(checkpoint, form, rules, Path(work))
        wrong = allowed is not None and not (from_floats <= allowed and (from_run or 0.0) <= 0.02)
        failed |= wrong
        run_says = "weights" if from_run is None else f"{from_run:.1e}"
        print(f"{form:<19} {what:<16} {from_floats:.1e} {run_says}{' WRONG' if wrong else ''}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if len(sys.argv) == 2 else __doc__)
