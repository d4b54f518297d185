#!/usr/bin/env bash
# Does every panel of the Grafana dashboard show something? Runs its queries on a real Prometheus.
#
#   scripts/check-dashboard.sh URL [--key KEY] [--dashboard FILE] [--seconds N] [--except TITLE]...
#
#   URL               metrics of a running server, for example http://127.0.0.1:8080/metrics
#   --key KEY         API key with the scope metrics
#   --dashboard FILE  (dashboards/iec.json)
#   --seconds N       how long Prometheus scrapes, once per second, before the queries (15)
#   --except TITLE    panel that may be empty, for example "Adapters in use" on a server without adapters
#
# The server must compute requests meanwhile: a rate without events is 0, but a quantile without events is not a number,
# which counts as empty. Fails if a query is refused, if a panel is empty, if the dashboard uses a metric that the server
# does not export, or if promtool finds an error in the metrics, except for its advice against the names of vLLM.
# Needs prometheus, promtool and python3 (apt-get install prometheus).
set -euo pipefail

die() { echo "check-dashboard.sh: $*" >&2; exit 2; }
[ $# -ge 1 ] || die "name the URL of the metrics; the head of this file explains the options"
url=$1; shift
key='' seconds=15 dashboard=$(dirname "$0")/../dashboards/iec.json except=()
while [ $# -gt 0 ]; do
  [ $# -ge 2 ] || die "$1 needs a value"
  case $1 in
    --key) key=$2 ;; --dashboard) dashboard=$2 ;; --seconds) seconds=$2 ;; --except) except+=("$2") ;;
    *) die "unknown option $1" ;;
  esac
  shift 2
done
for program in prometheus promtool python3 curl; do
  command -v "$program" > /dev/null || die "$program is not installed"
done

work=$(mktemp -d)
prometheus_pid=''
finish() {
  if [ -n "$prometheus_pid" ]; then kill "$prometheus_pid" 2> /dev/null || true; wait "$prometheus_pid" 2> /dev/null || true; fi
  rm -rf "$work"
}
trap finish EXIT

header=()
[ -z "$key" ] || header=(-H "Authorization: Bearer $key")
curl -fsS "${header[@]}" "$url" > "$work/metrics.txt" || die "$url does not answer"

# promtool advises against colons and against the suffix _total of histograms; both are in names that vLLM chose.
promtool check metrics < "$work/metrics.txt" > "$work/lint.txt" 2>&1 || true
if grep -v -e "metric names should not contain ':'" -e 'non-counter metrics should not have "_total" suffix' \
  "$work/lint.txt"; then
  echo "check-dashboard.sh: promtool refuses the metrics" >&2
  exit 1
fi

read -r scheme target path <<< "$(python3 - "$url" << 'PYTHON'
import sys, urllib.parse
url = urllib.parse.urlsplit(sys.argv[1])
print(url.scheme, url.netloc, url.path or "/metrics")
PYTHON
)"
cat > "$work/prometheus.yml" << YAML
global: {scrape_interval: 1s, scrape_timeout: 1s}
scrape_configs:
  - job_name: iec
    scheme: $scheme
    metrics_path: $path
    static_configs: [{targets: ["$target"]}]
YAML
if [ -n "$key" ]; then
  (umask 077; printf '%s' "$key" > "$work/key")
  printf '    authorization: {credentials_file: %s}\n' "$work/key" >> "$work/prometheus.yml"
fi

port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
prometheus --config.file="$work/prometheus.yml" --storage.tsdb.path="$work/data" \
  --web.listen-address="127.0.0.1:$port" --log.level=warn 2> "$work/prometheus.log" &
prometheus_pid=$!
# Prometheus needs some seconds until its first scrape.
scraped=''
for _ in $(seq 300); do
  curl -fs "http://127.0.0.1:$port/api/v1/query?query=up==1" 2> /dev/null | grep -q '"job":"iec"' && scraped=1 && break
  kill -0 "$prometheus_pid" 2> /dev/null || { cat "$work/prometheus.log" >&2; die "prometheus ended"; }
  sleep 0.1
done
[ -n "$scraped" ] || { cat "$work/prometheus.log" >&2; die "prometheus could not scrape $url within 30 s"; }
sleep "$seconds"

python3 - "$dashboard" "http://127.0.0.1:$port" "$seconds" "$work/metrics.txt" "${except[@]}" << 'PYTHON'
import json, math, re, sys, urllib.error, urllib.parse, urllib.request

dashboard, server, seconds, metrics, *allowed = sys.argv[1:]
window = f"{max(4, int(seconds))}s"
exported = set(re.findall(r"^# TYPE (\S+)", open(metrics).read(), re.M))
failed = queries = 0


def complain(title, text):
    global failed
    failed += 1
    print(f"{title}: {text}", file=sys.stderr)


for panel in json.load(open(dashboard))["panels"]:
    for target in panel.get("targets", []):
        title, expr = panel["title"], target["expr"]
        queries += 1
        for name in re.findall(r"\b((?:vllm:|iec_|process_)\w+)", expr):
            if name not in exported and re.sub(r"_(bucket|sum|count)$", "", name) not in exported:
                if title not in allowed:
                    complain(title, f"{name} is not exported")
        query = expr.replace("$__rate_interval", window)
        query = query.replace("$model", ".*").replace("$instance", ".*")
        address = server + "/api/v1/query?" + urllib.parse.urlencode({"query": query})
        try:
            result = json.load(urllib.request.urlopen(address))["data"]["result"]
        except urllib.error.HTTPError as error:
            complain(title, f"{query}\n  {json.load(error).get('error')}")
            continue
        values = [float(series["value"][1]) for series in result]
        if not any(math.isfinite(value) for value in values) and title not in allowed:
            complain(title, f"found {'only NaN' if values else 'no series'} for {query}")
print(f"{queries} queries, {failed} failed")
sys.exit(1 if failed or not queries else 0)
PYTHON
