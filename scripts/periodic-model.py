"""Makes a checkpoint say the same tokens over and over, to measure speculation: periodic-model.py FROM_DIR TO_DIR PERIOD

Takes a bf16 checkpoint of one safetensors file with an untied output matrix (`iec synth --like tinyllama-1.1b`). What attention
and MLP add becomes zero, and the output row of each token the embedding of the token before it in a circle of PERIOD tokens, so
that greedy text is periodic while every weight is still read and multiplied. Python's standard library only.
"""

import json
import mmap
import shutil
import struct
import sys

source, target, period = sys.argv[1], sys.argv[2], int(sys.argv[3])
shutil.copytree(source, target)
with open(f"{target}/model.safetensors", "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
    start = 8 + struct.unpack("<Q", data[:8])[0]
    tensors = {name: entry for name, entry in json.loads(data[8:start]).items() if name != "__metadata__"}
    place = {name: slice(*(start + at for at in entry["data_offsets"])) for name, entry in tensors.items()}
    for name, where in place.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            data[where] = bytes(where.stop - where.start)
    vocab, hidden = tensors["lm_head.weight"]["shape"]
    row = 2 * hidden
    embedding, head = place["model.embed_tokens.weight"].start, place["lm_head.weight"].start
    for token in range(vocab):
        first = token - token % period
        after = first + (token - first + 1) % min(period, vocab - first)
        data[head + after * row : head + (after + 1) * row] = data[embedding + token * row : embedding + (token + 1) * row]
