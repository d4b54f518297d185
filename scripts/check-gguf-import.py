#!/usr/bin/env python3
"""Does `iec import-gguf` read the files that the converter of llama.cpp writes? Converts small checkpoints with
convert_hf_to_gguf.py, imports the files, and compares greedy tokens with those that transformers computed.

    scripts/gpu-check.sh --unpack tests/fixtures unpacked
    scripts/check-gguf-import.py LLAMA_CPP_SOURCE unpacked [FIXTURE...]

Needs the packages of tests/reference/families.txt, numpy, pyyaml and tqdm, and target/release/iec (or IEC). Prints the
tokens that agree from the start of each text. The converter identifies a tokenizer by the hash of what it makes of a
text, so the small tokenizers have no name there: it gets one, and the tokenizer of the fixture is used for the import.
Some fixtures are changed to what the converter expects of real checkpoints (see `prepare`).

Files without what a model needs give other tokens, here and in llama.cpp: the llama family of GGUF has no sliding
windows (mistral-swa), Gemma 2 always has the usual scale of scores (gemma2), Gemma 3 a global layer after five others
(gemma3, gemma3-vl), and the growth of queries with their positions is not written for Mistral Small 4 (mistral4).
"""

import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file

IEC = os.environ.get("IEC", "target/release/iec")
# Names of rules that divide texts, in llama.cpp.
RULES = {
    "cohere2": "command-r", "deepseek2": "deepseek-llm", "deepseek3": "deepseek-v3", "glm4flash": "glm4",
    "glm4moe": "glm4", "gptoss-bf16": "gpt-4o", "gptoss-mxfp4": "gpt-4o", "granite": "refact", "llama-gqa": "llama-bpe",
    "minimaxm2": "minimax-m2", "ministral3": "tekken", "mistral4": "tekken", "museglimmer": "llama-bpe",
    "olmo2": "dbrx", "olmo3": "dbrx", "smollm3": "smaug-bpe",
}  # fmt: skip


def prepare(name, folder):
    """Changes a fixture to what the converter expects."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if name == "cohere2":
        config["rotary_pct"] = 1.0
    if name == "gemma4-unified":
        config["text_config"]["moe_intermediate_size"] = 64
    path.write_text(json.dumps(config))
    if name == "minimaxm2":
        for file in folder.glob("*.safetensors"):
            tensors = {key: value for key, value in load_file(file).items() if ".layers.3." not in key}
            save_file(tensors, file, metadata={"format": "pt"})


def convert(source, name, folder, out):
    """Runs the converter; it is called in a process of its own, since it keeps state."""
    sys.path[:0] = [source, f"{source}/gguf-py"]
    from conversion import base, gemma, glm, phi

    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: RULES.get(name, "qwen2")
    for model in (model for module in (gemma, glm, phi) for model in vars(module).values()):
        # They look for tokens and files that the small tokenizers do not have.
        if isinstance(model, type) and issubclass(model, base.TextModel) and "set_vocab" in vars(model):
            model.set_vocab = lambda self: self._set_vocab_gpt2()
    sys.argv = ["convert_hf_to_gguf.py", folder, "--outfile", out, "--outtype", "f32"]
    runpy.run_path(f"{source}/convert_hf_to_gguf.py", run_name="__main__")


def tokens(pack, text, count, work):
    """What iec generates after a text."""
    prompts, trace = work / "prompts.jsonl", work / "trace"
    prompts.write_text(json.dumps({"prompt": text}) + "\n")
    command = [IEC, "run", "-q", "--model-dir", pack, "--prompts-file", prompts, "-n", str(count), "--greedy"]
    options = ["--ignore-eos", "--precision", "fp32", "--trace-ids", trace, "--overwrite"]
    subprocess.run(command + options, check=True, stdout=subprocess.DEVNULL)
    lines = map(json.loads, trace.read_text().splitlines())
    return [line["next_id"] for line in lines if line["kind"] == "gen_step"]


def check(source, fixture, work):
    name, folder, file, pack = fixture.name, work / "source", work / "model.gguf", work / "pack"
    shutil.copytree(fixture, folder)
    prepare(name, folder)
    converter = subprocess.run(
        [sys.executable, __file__, "--convert", source, name, folder, file], capture_output=True, text=True
    )
    if converter.returncode != 0:
        return "the converter failed: " + converter.stderr.strip().splitlines()[-1]
    tokenizer = ["--tokenizer", fixture / "tokenizer.json"]
    imported = subprocess.run(
        [IEC, "import-gguf", "-q", file, "--out-dir", pack, "--dtype", "fp32", *tokenizer], capture_output=True, text=True
    )
    if imported.returncode != 0:
        return imported.stderr.strip()
    same = count = 0
    for prompt in json.loads((fixture / "golden.json").read_text())["prompts"]:
        expected = prompt["greedy_ids"]
        ours = tokens(pack, prompt["text"], len(expected), work)
        same += next((i for i, pair in enumerate(zip(ours, expected)) if pair[0] != pair[1]), len(ours))
        count += len(expected)
    return f"{same}/{count}"


def main(source, unpacked, *names):
    for name in names or sorted(path.name for path in Path(unpacked).iterdir()):
        with tempfile.TemporaryDirectory() as work:
            print(f"{name:<18}", check(source, Path(unpacked) / name, Path(work)), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--convert":
        convert(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
