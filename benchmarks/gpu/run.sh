#!/usr/bin/env bash
# Measures nanoserve on the GPU of this machine in under 8 minutes: no network, no Ray. --rehearse needs no GPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" -m benchmarks.gpu.run "$@"
