#!/usr/bin/env bash
# Checks `iec serve` with the clients and tools that people use: openai and anthropic, async-openai of Rust, instructor,
# the Agents SDK, langgraph, the AI SDK, ollama's client, the OpenAI library in a browser, the tools of public MCP servers,
# lm-evaluation-harness, schemathesis, jsonschema, Prometheus with the dashboard, wrk, haproxy, Chromium with the page,
# aiperf, and the router SMG over gRPC.
#
#   scripts/serve-accept.sh [--iec BIN] [--work DIR] [--no-install] [OPTION...]
#
#   --iec BIN      the program under test (target/release/iec)
#   --work DIR     directory for programs, packs and logs; it is kept (a temporary one, which is removed)
#   --no-install   use what is installed; a part without its program is skipped
#   --only NAME    run this part only; repeatable; --list prints the names
#   --full         300 schemas instead of 60, and more examples of schemathesis
#   --soak MIN     also minutes of mixed load: adapters come and go, requests are cancelled, wrong, cut; restarts
#   --overload S   also seconds of three times the capacity
#
# Other options are those of tests/serve/accept.py. Needs python3 with venv and PyPI; for async-openai, cargo and
# crates.io; for the clients of npm, node 20 and npm; for the programs of Debian, apt-get as root. Everything runs on the
# loopback interface. Takes about 16 minutes, half of them to install; with --work, a second run installs nothing. Prints
# a line for each part: `ok`, `skipped` or `FAILED`; exit code 1 if one failed.
set -euo pipefail
root=$(realpath "$(dirname "$0")/..")
iec=$root/target/release/iec work='' install=1 keep='' rest=()
while [ $# -gt 0 ]; do
  case $1 in
    --iec) iec=$(realpath "$2"); shift 2 ;;
    --work) work=$(realpath -m "$2") keep=1; shift 2 ;;
    --no-install) install=''; shift ;;
    -h | --help) sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//'; exit ;;
    *) rest+=("$1"); shift ;;
  esac
done
[ -n "$work" ] || work=$(mktemp -d)
mkdir -p "$work"
[ -n "$keep" ] || trap 'rm -rf "$work"' EXIT

# One environment for the clients; others for aiperf and for agents, whose dependencies are in conflict with them.
install_python() {
  local name=$1
  shift
  [ ! -e "$work/$name/installed" ] || return 0
  python3 -m venv "$work/$name"
  timeout 600 "$work/$name/bin/pip" -q --disable-pip-version-check install "$@" && touch "$work/$name/installed"
}

# Clients of npm and MCP servers, at the versions of tests/serve/node/package.json.
install_node() {
  command -v npm > /dev/null || { echo "serve-accept.sh: npm is missing; its clients are skipped" >&2; return 0; }
  [ ! -e "$work/node/installed" ] || return 0
  mkdir -p "$work/node"
  cp "$root/tests/serve/node/package.json" "$work/node/"
  (cd "$work/node" && timeout 600 npm install --no-audit --no-fund --no-package-lock --loglevel=error) > "$work/npm.log" 2>&1 &&
    touch "$work/node/installed" ||
    echo "serve-accept.sh: npm failed, see $work/npm.log; its clients are skipped" >&2
}

install_debian() {
  local missing=()
  command -v prometheus > /dev/null || missing+=(prometheus)
  command -v wrk > /dev/null || missing+=(wrk)
  command -v chromium > /dev/null || missing+=(chromium)
  [ -x /usr/sbin/haproxy ] || command -v haproxy > /dev/null || missing+=(haproxy)
  [ ${#missing[@]} -gt 0 ] || return 0
  if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "serve-accept.sh: cannot install ${missing[*]}; their parts are skipped" >&2
    return 0
  fi
  # The packages start no services: the parts start what they need.
  timeout 600 env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 sh -c \
    'apt-get -qq update && apt-get -qq install -y --no-install-recommends "$@"' sh "${missing[@]}" \
    > "$work/apt.log" 2>&1 ||
    echo "serve-accept.sh: apt-get failed, see $work/apt.log; parts without their programs are skipped" >&2
}

if [ -n "$install" ]; then
  install_python venv 'openai>=3.54,<4' 'anthropic>=2.12,<3' 'lm_eval[api]==0.4.13' 'schemathesis==4.32.*' \
    'jsonschema[format-nongpl]>=4.26,<5' 'websocket-client>=1.9,<2' ||
    { echo "serve-accept.sh: pip could not install the clients" >&2; exit 1; }
  install_python venv-aiperf 'aiperf==0.13.*' ||
    echo "serve-accept.sh: aiperf is not installed; its part is skipped" >&2
  install_python venv-agents 'instructor==1.17.*' 'openai-agents==0.24.*' 'langgraph==1.2.*' 'langchain-openai==1.7.*' ||
    echo "serve-accept.sh: clients for agents are not installed; their parts are skipped" >&2
  install_python venv-smg 'smg==1.13.0' ||
    echo "serve-accept.sh: smg is not installed; its part is skipped" >&2
  install_node
  install_debian
fi
python=$work/venv/bin/python
[ -x "$python" ] || python=python3
aiperf=()
[ ! -x "$work/venv-aiperf/bin/aiperf" ] || aiperf=(--aiperf "$work/venv-aiperf/bin/aiperf")
agents=()
[ ! -x "$work/venv-agents/bin/python" ] || agents=(--agents "$work/venv-agents/bin/python")
smg=()
[ ! -x "$work/venv-smg/bin/smg" ] || smg=(--smg "$work/venv-smg/bin/smg")
export PYTHONDONTWRITEBYTECODE=1
# Packs of another build are made again.
rm -rf "$work/run/packs"
"$python" "$root/tests/serve/accept.py" --iec "$iec" --work "$work/run" "${aiperf[@]}" "${agents[@]}" "${smg[@]}" "${rest[@]}"
