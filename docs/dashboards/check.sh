#!/usr/bin/env bash
# Asks a real Prometheus every query of the dashboard while a run is going, and fails if one has no answer.
#
#   docs/dashboards/check.sh [RUN_ADDRESS] [PROMETHEUS_ADDRESS]
#
# RUN_ADDRESS is the run's `metrics.listen` (default 127.0.0.1:9464). The Prometheus started here listens on
# PROMETHEUS_ADDRESS (default 127.0.0.1:9490), keeps its data in a temporary directory and ends with the script, which
# takes two minutes at most. Needs `prometheus` and `promtool`; installs nothing.
# Exit codes: 0 every query is answered, 1 one is not, 2 the check itself could not run.
set -euo pipefail

readonly run=${1:-127.0.0.1:9464}
readonly server=${2:-127.0.0.1:9490}
readonly deadline=$((SECONDS + 110))
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly here

for tool in prometheus promtool; do
    command -v "$tool" >/dev/null || { echo "check.sh: $tool is not installed" >&2; exit 2; }
done

temporary=$(mktemp -d)
prometheus_pid=
stop() {
    if [[ -n $prometheus_pid ]]; then
        kill "$prometheus_pid" 2>/dev/null || true
        wait "$prometheus_pid" 2>/dev/null || true
    fi
    rm -rf "$temporary"
}
trap stop EXIT
trap 'exit 130' INT TERM

sed "s/127\.0\.0\.1:9464/$run/" "$here/prometheus.yml" >"$temporary/prometheus.yml"
promtool check config "$temporary/prometheus.yml" >"$temporary/config.log" 2>&1 ||
    { cat "$temporary/config.log" >&2; exit 2; }

mapfile -t queries < <(grep -oE '"expr": "([^"\\]|\\.)*"' "$here/r3.json" |
    sed -E 's/^"expr": "//; s/"$//; s/\\(["\\])/\1/g' | sort -u)
((${#queries[@]} > 0)) || { echo "check.sh: r3.json holds no query" >&2; exit 2; }

prometheus --config.file="$temporary/prometheus.yml" --storage.tsdb.path="$temporary/data" \
    --web.listen-address="$server" >"$temporary/prometheus.log" 2>&1 &
prometheus_pid=$!

answer() { timeout 10 promtool query instant "http://$server" "$1" 2>"$temporary/query.log"; }

until answer 'up{job="r3"} == 1' 2>/dev/null | grep -q .; do
    if ! kill -0 "$prometheus_pid" 2>/dev/null || ((SECONDS >= deadline)); then
        echo "check.sh: Prometheus could not scrape $run" >&2
        tail -n 5 "$temporary/prometheus.log" >&2
        exit 2
    fi
    sleep 0.5
done

# A rate needs two scrapes and some values come with the first step or evaluation: ask again until the deadline.
unanswered=("${queries[@]}")
while ((${#unanswered[@]} > 0 && SECONDS < deadline)); do
    still=()
    for query in "${unanswered[@]}"; do
        answer "$query" | grep -q . || still+=("$query")
    done
    unanswered=("${still[@]}")
    ((${#unanswered[@]} == 0)) || sleep 1
done

for query in "${unanswered[@]}"; do
    echo "no answer: $query"
done
echo "$((${#queries[@]} - ${#unanswered[@]})) of ${#queries[@]} queries answered"
((${#unanswered[@]} == 0))
