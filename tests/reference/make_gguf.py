#!/usr/bin/env python3
"""Makes tests/fixtures/gguf/blocks.gguf: blocks of every GGML type that iec decodes, beside their values.

The blocks are random bytes with scales of moderate size; the values come from gguf-py, the Python implementation by the
makers of the format, so that both are independent of this program.

    python3 -m venv venv && venv/bin/pip install gguf==0.18.0 numpy
    venv/bin/python tests/reference/make_gguf.py tests/fixtures/gguf/blocks.gguf

The model files beside it are made by llama.cpp's llama-quantize from an export of the embedded model:

    iec pack --hf-dir assets/stories260k --out-dir /tmp/pack
    iec export-gguf --model-dir /tmp/pack --out /tmp/f32.gguf
    llama-quantize --pure /tmp/f32.gguf tests/fixtures/gguf/stories260k-q8_0.gguf q8_0
    llama-quantize --pure /tmp/f32.gguf tests/fixtures/gguf/stories260k-q4_1.gguf q4_1
"""

import sys

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

ROWS, SUPER = 2, 256
# Where the f16 scales of a block lie, in bytes.
SCALES = {
    T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0], T.IQ4_NL: [0], T.MXFP4: [],
    T.Q2_K: [80, 82], T.Q3_K: [108], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208], T.IQ4_XS: [0],
}

random = np.random.default_rng(20261121)
writer = GGUFWriter(sys.argv[1], "blocks")
for kind, scales in SCALES.items():
    elements, size = GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (ROWS * SUPER // elements, size), dtype=np.uint8)
    for at in scales:
        halves = random.normal(0, 0.05, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    if kind == T.MXFP4:
        blocks[:, 0] = random.integers(110, 135, len(blocks))
    raw = blocks.reshape(ROWS, -1)
    values = dequantize(raw, kind).astype(np.float32)
    writer.add_tensor(kind.name, raw, raw_dtype=kind)
    writer.add_tensor(kind.name + ".values", values)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
