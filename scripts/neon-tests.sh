#!/usr/bin/env bash
# Runs the parity tests of the CPU kernels for aarch64 in an emulator: NEON gives the bits of the scalar kernels.
# Exits with 3 where the Rust target, its C compiler or qemu-user is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

target=aarch64-unknown-linux-gnu
for tool in aarch64-linux-gnu-gcc qemu-aarch64; do
    command -v "$tool" >/dev/null || { echo "$tool is missing (Debian: gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)" >&2; exit 3; }
done
{ command -v rustup >/dev/null && rustup target add "$target" 2>/dev/null; } || { echo "Rust has no target $target" >&2; exit 3; }

export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu"
# The other tests of the module start the program, which the emulator does not do.
cargo test --locked --release --target "$target" --test it -- parity:: \
    --skip whole_models_give_the_same_logits --skip an_instruction_set_that_does_not_exist
