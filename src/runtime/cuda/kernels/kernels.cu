// All kernels of iec, one translation unit. `scripts/ptx.sh` compiles it to PTX, `scripts/simulated-cuda.sh` for the
// host.
#include "attention_decode.cuh"
#include "attention_decode_mma.cuh"
#include "attention_prefill.cuh"
#include "attention_prefill_mma.cuh"
#include "gated.cuh"
#include "logits.cuh"
#include "matmul.cuh"
#include "moe.cuh"
#include "norm.cuh"
#include "rope.cuh"
#include "router.cuh"
#include "sizes.cuh"
