#!/usr/bin/env python3
"""What does speculation save? Measures decoding with and without drafts, in turn, and prints the ratios.

  scripts/speculation.py prompts PACK [--speculate HOW] [--rounds N]
      the 40 prompts of benches/edits.jsonl, which change a given text or copy facts from it: median ratio of the prompts
  scripts/speculation.py acceptance PACK [--speculate mtp] [--tokens N] [--depth N] [--rounds N]
      drafts of N tokens, each right with a chosen probability (iec bench --draft-acceptance): tokens per step, tokens/s,
      ratio to decoding without drafts

IEC names the program (target/release/iec). The ratios are medians over the rounds; each is of two runs after another.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess

ROOT = pathlib.Path(__file__).parent.parent
IEC = os.environ.get("IEC", str(ROOT / "target/release/iec"))


def measure(*arguments):
    output = subprocess.run([IEC, *arguments], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return json.loads(output.stdout.splitlines()[-1])


def spread(ratios):
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def prompts(options):
    run = ["run", options.pack, "--prompts-file", str(ROOT / "benches/edits.jsonl"), "-n", "256", "--chat-template", "auto", "--json", "-q"]
    ratios, counts = {}, None
    for _ in range(options.rounds):
        pair = [measure(*run, "--speculate", how) for how in ("off", options.speculate)]
        texts = [[prompt["text"] for prompt in line["prompts"]] for line in pair]
        if texts[0] != texts[1]:
            raise SystemExit("the texts differ")
        counts = pair[1].get("drafters", {})
        for i, (off, on) in enumerate(zip(*(line["prompts"] for line in pair))):
            if off["tokens_generated"] > 8 and on["decode_time_s"] > 0:
                ratios.setdefault(i, []).append(off["decode_time_s"] / on["decode_time_s"])
    each = sorted(statistics.median(of_prompt) for of_prompt in ratios.values())
    print(f"{len(each)} prompts, speed with --speculate {options.speculate} / off: median {statistics.median(each):.2f}, "
          f"quarter {each[len(each) // 4]:.2f}, least {each[0]:.2f}, most {each[-1]:.2f}; drafts {counts}")


def acceptance(options):
    bench = ["bench", options.pack, "--prompt-len", "16", "-n", "128", "--depth", str(options.depth), "--json", "-q"]
    drafts = ["--speculate", options.speculate, "--draft-tokens", str(options.tokens)]
    print("| acceptance | tokens per step | tokens/s | without drafts | ratio |\n|---|---|---|---|---|")
    for share in (0.0, 0.4, 0.6, 0.8, 0.9, 1.0):
        lines = []
        for _ in range(options.rounds):
            lines.append((measure(*bench), measure(*bench, *drafts, "--draft-acceptance", str(share))))
        counts = [count for _, on in lines for count in on.get("drafters", {}).values()]
        length = 1 + sum(count["accepted"] for count in counts) / max(1, sum(count["drafts"] for count in counts))
        speed = [statistics.median(line[i]["tps_decode"] for line in lines) for i in (0, 1)]
        ratio = spread([on["tps_decode"] / off["tps_decode"] for off, on in lines])
        print(f"| {share} | {length:.2f} | {speed[1]:.1f} | {speed[0]:.1f} | {ratio} |", flush=True)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("what", choices=["prompts", "acceptance"])
parser.add_argument("pack")
parser.add_argument("--speculate", default=None)
parser.add_argument("--tokens", type=int, default=3)
parser.add_argument("--depth", type=int, default=0)
parser.add_argument("--rounds", type=int, default=3)
options = parser.parse_args()
options.speculate = options.speculate or ("auto" if options.what == "prompts" else "off")
(prompts if options.what == "prompts" else acceptance)(options)
