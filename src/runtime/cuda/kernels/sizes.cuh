// Sizes of the argument structs that the kernels were built with; the host reports an error if its own differ.
#pragma once
#include "args.cuh"

// out = sizes in bytes of Matrix, Acts, Share, Matmul, Norm, Gated, Few, Row, Cache, Rope, LatentRope, TokenInputs,
// Tile, Attention, Route, Group, RouteGroup, Router, Logits, TopK, Change, Adapted, LowRank, StateRun, Conv,
// LinearAttention, GatedNorm, RowGate, SpreadHeads, Sizes: 30 numbers.
//
// Grid: 1. Block: 1. Dynamic shared memory: none.
KERNEL sizes(Sizes a) {
    const uint32_t all[] = {
        sizeof(Matrix),     sizeof(Acts),   sizeof(Share),  sizeof(Matmul), sizeof(Norm),  sizeof(Gated),     sizeof(Few),
        sizeof(Row),        sizeof(Cache),  sizeof(Rope),   sizeof(LatentRope), sizeof(TokenInputs),
        sizeof(Tile),       sizeof(Attention), sizeof(Route), sizeof(Group),
        sizeof(RouteGroup), sizeof(Router), sizeof(Logits), sizeof(TopK),   sizeof(Change),
        sizeof(Adapted),    sizeof(LowRank), sizeof(StateRun), sizeof(Conv), sizeof(LinearAttention),
        sizeof(GatedNorm),  sizeof(RowGate), sizeof(SpreadHeads), sizeof(Sizes),
    };
    for (uint32_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        a.out[i] = all[i];
    }
}
