#!/usr/bin/env bash
# Time and memory of each method on the shapes of VGG16 and ResNet32 with CIFAR-10, minibatches of 128: by part, and
# 200 whole iterations as ratios to SGD-m. Needs no data; under 8 minutes on a GPU.
#
#   examples/paper/gpu_check.sh [--smoke]
#
# --smoke: two iterations on minibatches of 8, with a small VGG, for a machine without a GPU. PYTHON names the
# interpreter, OUT the directory of costs.jsonl, which has a line for each method as soon as it is measured.
set -euo pipefail
cd "$(dirname "$0")/../.."

options=(--problems resnet32-cifar10 vgg16-cifar10 --steps 200 --repeats 10)
if [[ "${1:-}" == --smoke ]]; then
  options=(--problems resnet32-cifar10 vgg8-mnist --steps 2 --repeats 1 --batch-size 8)
elif [[ $# -gt 0 ]]; then
  echo "Usage: $0 [--smoke]" >&2
  exit 2
fi

exec timeout 480 "${PYTHON:-python3}" -m examples.paper costs --out "${OUT:-runs}/costs.jsonl" "${options[@]}"
