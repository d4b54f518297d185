#!/usr/bin/env python3
"""Measures adapters beside llama.cpp: the same LoRA factors, as PEFT directories and as GGUF files, on one model.

    scripts/race-adapters.py --pack DIR --gguf FILE [--iec BIN] [--server LLAMA_SERVER] [--rounds N] [--threads N]
                             [--work DIR] [ROW...]

DIR is a pack of a Llama whose matrices are in q4_0, FILE the same model, made by `iec export-gguf`. Adapters with
random factors in f16 are written to --work once. Each round runs every row of both programs with and without
adapters, one after the other, in alternating order. Prints a Markdown table: tokens of the answers divided by the
time for prompts and answers (median of the rounds), and the ratio to the same without adapters; in the last row,
tokens of the prompt per second. Needs numpy, safetensors and gguf from PyPI.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.request

import gguf
import numpy as np
from safetensors.numpy import save_file

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GGUF_NAMES = dict(zip(ALL, ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]))
# Row: texts, adapters (text i uses adapter i % adapters; with one text all are added), rank, targets, tokens of the
# prompt, tokens of the answer.
ROWS = {
    "1 text, 1 adapter, r32 on all": (1, 1, 32, ALL, 32, 64),
    "1 text, 4 adapters, r32 on all": (1, 4, 32, ALL, 32, 64),
    "1 text, 4 adapters, r32 on q and v": (1, 4, 32, ["q_proj", "v_proj"], 32, 64),
    "8 texts, 4 adapters, r16 on all": (8, 4, 16, ALL, 32, 64),
    "8 texts, 4 adapters, r32 on q and v": (8, 4, 32, ["q_proj", "v_proj"], 32, 64),
    "32 texts, 32 adapters, r8 on all": (32, 32, 8, ALL, 32, 64),
    "prompt of 512, 1 adapter, r32 on all": (1, 1, 32, ALL, 512, 1),
}


def shapes(config):
    """Returns (outputs, inputs) of each matrix of a layer."""
    hidden, inter, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    kv = config["num_key_value_heads"] * head
    q = heads * head
    return dict(zip(ALL, [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q), (inter, hidden), (inter, hidden),
                          (hidden, inter)]))


def make_adapter(work, config, seed, rank, targets):
    """Writes an adapter in both forms unless it exists; returns the PEFT directory and the GGUF file."""
    name = f"r{rank}-{'all' if targets is ALL else 'qv'}-{seed}"
    peft, file = os.path.join(work, name), os.path.join(work, name + ".gguf")
    if os.path.exists(file):
        return peft, file
    os.makedirs(peft, exist_ok=True)
    rng, tensors = np.random.default_rng(seed), {}
    writer = gguf.GGUFWriter(file + ".tmp", "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for layer in range(config["num_hidden_layers"]):
        for target in targets:
            rows, cols = shapes(config)[target]
            a = (rng.standard_normal((rank, cols)) * 0.02).astype(np.float16)
            b = (rng.standard_normal((rows, rank)) * 0.02).astype(np.float16)
            part = "self_attn" if target in ALL[:4] else "mlp"
            prefix = f"base_model.model.model.layers.{layer}.{part}.{target}"
            tensors[prefix + ".lora_A.weight"], tensors[prefix + ".lora_B.weight"] = a, b
            if target in ("q_proj", "k_proj"):
                # llama.cpp pairs neighbouring rows for the rotary embedding.
                heads = config["num_attention_heads" if target == "q_proj" else "num_key_value_heads"]
                b = b.reshape(heads, 2, rows // heads // 2, rank).swapaxes(1, 2).reshape(rows, rank)
            writer.add_tensor(f"blk.{layer}.{GGUF_NAMES[target]}.weight.lora_a", np.ascontiguousarray(a))
            writer.add_tensor(f"blk.{layer}.{GGUF_NAMES[target]}.weight.lora_b", np.ascontiguousarray(b))
    save_file(tensors, os.path.join(peft, "adapter_model.safetensors"))
    with open(os.path.join(peft, "adapter_config.json"), "w") as out:
        json.dump({"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}, out)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.rename(file + ".tmp", file)
    return peft, file


def scaled(texts, adapters, text):
    """Returns the numbers of the adapters of a text."""
    return list(range(adapters)) if texts == 1 else [text % adapters]


def prompt(tokens):
    """Returns a text of this many tokens: the synthetic tokenizer puts two before one per word."""
    return "a " * (tokens - 2)


def measure_iec(args, row, adapters, active):
    texts, count, _, _, before, new = row
    path = os.path.join(args.work, "prompts.jsonl")
    with open(path, "w") as out:
        for text in range(texts):
            names = [f"a{i}" for i in scaled(texts, count, text)] if active else []
            out.write(json.dumps({"prompt": prompt(before), "adapters": names}) + "\n")
    lora = [word for i, (peft, _) in enumerate(adapters) for word in ("--lora", f"a{i}={peft}")] if active else []
    command = [args.iec, "run", args.pack, "--precision", "int4", "--threads", str(args.threads), "--prompts-file", path,
               "--batch", str(texts), "--max-new", str(new), "--ignore-eos", "--prefix-cache", "off",
               "--speculate", "off", "--json", *lora, *args.iec_option]
    line = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    line = json.loads(line)
    if new == 1:
        return line["tps_prefill"]
    return line["tokens_generated"] / (line["prefill_time_s"] + line["decode_time_s"])


class Server:
    """llama-server with adapters that no request uses unless it says so."""

    def __init__(self, args, texts, adapters, context):
        # In parts of lists of files, since each option takes one list.
        lora = ["--lora", ",".join(file for _, file in adapters), "--lora-init-without-apply"] if adapters else []
        command = [args.server, "-m", args.gguf, "-np", str(texts), "-c", str(context), "--kv-unified", "-fa", "on", "-t",
                   str(args.threads), "-tb", str(args.threads), "--port", "8098", *lora]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            try:
                urllib.request.urlopen("http://127.0.0.1:8098/health")
                return
            except OSError:
                if self.process.poll() is not None:
                    sys.exit("llama-server ended before it was ready")
                time.sleep(0.1)
        sys.exit("llama-server was not ready after a minute")

    def complete(self, body):
        request = urllib.request.Request("http://127.0.0.1:8098/completion", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request))["timings"]

    def close(self):
        self.process.terminate()
        self.process.wait()


def measure_llama(args, row, adapters, active):
    texts, count, _, _, before, new = row
    server = Server(args, texts, adapters if active else [], texts * (before + new + 16))
    timings = [None] * texts

    def one(text):
        lora = [{"id": i, "scale": 1.0} for i in scaled(texts, count, text)] if active else []
        body = {"prompt": prompt(before), "n_predict": new, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
        timings[text] = server.complete(body | ({"lora": lora} if active else {}))

    try:
        one(0)
        begin = time.monotonic()
        threads = [threading.Thread(target=one, args=(text,)) for text in range(texts)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        seconds = time.monotonic() - begin
    finally:
        server.close()
    if new == 1:
        return timings[0]["prompt_per_second"]
    return sum(timing["predicted_n"] for timing in timings) / seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", required=True)
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--iec", default="target/release/iec")
    parser.add_argument("--iec-option", action="append", default=[], help="an option for iec run")
    parser.add_argument("--server", default="target/llama.cpp/bin/llama-server")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--work", default="target/race/adapters")
    parser.add_argument("row", nargs="*", help=f"rows: {'; '.join(ROWS)}")
    args = parser.parse_args()
    os.makedirs(args.work, exist_ok=True)
    with open(os.path.join(args.pack, "config.json")) as file:
        config = json.load(file)
    print("| row | iec, tokens/s | relative to none | llama.cpp, tokens/s | relative to none | iec / llama.cpp |")
    print("|---|---|---|---|---|---|")
    for name in args.row or ROWS:
        row = ROWS[name]
        adapters = [make_adapter(args.work, config, seed, row[2], row[3]) for seed in range(row[1])]
        runs = [(measure, active) for measure in (measure_iec, measure_llama) for active in (False, True)]
        found = {run: [] for run in runs}
        for number in range(args.rounds):
            for run in runs if number % 2 == 0 else runs[::-1]:
                found[run].append(run[0](args, row, adapters, run[1]))
                print(f"{name}: {run[0].__name__}, adapters {run[1]}: {found[run][-1]:.1f}", file=sys.stderr)
        median = {run: statistics.median(found[run]) for run in runs}
        of = [median[run] for run in runs]
        print(f"| {name} | {of[1]:.1f} | {of[1] / of[0]:.3f} | {of[3]:.1f} | {of[3] / of[2]:.3f} | {of[1] / of[3]:.2f} |",
              flush=True)


if __name__ == "__main__":
    main()
