#!/usr/bin/env bash
# Runs a command of this project on a machine that has torch but not the project installed and no network.
# Usage: benchmarks/gpu.sh python benchmarks/throughput.py --shape 1b
# `.gpu/site.tar.xz`, if present, holds the pure-Python dependencies that machine lacks.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
if [ -f .gpu/site.tar.xz ]; then
  site=$(mktemp -d)
  tar xJf .gpu/site.tar.xz -C "$site"
  export PYTHONPATH="$PYTHONPATH:$site"
fi
exec "$@"
