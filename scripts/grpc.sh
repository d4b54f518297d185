#!/usr/bin/env bash
# Makes src/serve/grpc/generated: the messages and the service of src/serve/grpc/proto in Rust, and their descriptors.
# Usage: scripts/grpc.sh [--check]
#   (nothing)   writes them
#   --check     compares with what is there, byte by byte
# Needs cargo, and the crates of scripts/grpc/Cargo.lock. No protoc: the compiler of .proto files is a crate (protox).
set -euo pipefail
cd "$(dirname "$0")/.."

check=''
case "${1:-}" in
'') ;;
--check) check=1 ;;
*) sed -n '2,7s/^# //p' "$0" >&2; exit 2 ;;
esac

made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
cargo run --quiet --locked --manifest-path scripts/grpc/Cargo.toml -- src/serve/grpc/proto "$made"
generated=src/serve/grpc/generated
if [ -z "$check" ]; then
    cp "$made"/* "$generated/"
    exit
fi
for file in descriptors.bin smg.grpc.common.rs vllm.grpc.engine.rs; do
    cmp "$made/$file" "$generated/$file" || { echo "$generated/$file does not belong to the .proto files: run scripts/grpc.sh" >&2; exit 1; }
done
