"""One measurement of OpenVINO GenAI, for scripts/race.sh: openvino-bench.py MODEL PROMPT_TOKENS NEW_TOKENS THREADS

MODEL is a GGUF file or an exported directory. Prints tokens per second: of the prompt, or, with more than one new token, of
the tokens after the first. The prompt is generated once before the measurement.
"""

import sys

import numpy
import openvino
import openvino_genai

model, prompt, new, threads = sys.argv[1], *map(int, sys.argv[2:])
pipe = openvino_genai.LLMPipeline(
    model,
    "CPU",
    INFERENCE_NUM_THREADS=threads,
    PERFORMANCE_HINT="LATENCY",
    DYNAMIC_QUANTIZATION_GROUP_SIZE=128,
)
config = openvino_genai.GenerationConfig(max_new_tokens=new, min_new_tokens=new, ignore_eos=True, apply_chat_template=False)


def measure(seed):
    ids = numpy.random.default_rng(seed).integers(10, 30000, (1, prompt))
    tokens = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(numpy.ones_like(ids)))
    metrics = pipe.generate(tokens, config).perf_metrics
    return prompt * 1000 / metrics.get_ttft().mean if new == 1 else 1000 / metrics.get_tpot().mean


measure(1)
print(measure(2))
