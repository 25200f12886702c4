#!/usr/bin/env bash
# The tests under the oldest torch that pyproject.toml promises and the newest that there is, each in an environment
# of its own (.venv-torch-<version>).
#
#   bash benchmarks/torch_versions.sh [VERSION ...] [-- PYTEST ARGUMENTS]
#   TORCH_INDEX=<url or folder of CPU builds> bash benchmarks/torch_versions.sh 2.13.0
#
# Without TORCH_INDEX the wheels of the configured index are taken; on Linux these bring CUDA with them, some gigabytes
# a version. Each result is a line: the version that ran, and passed or FAILED; the last one's status is the script's.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
oldest=$(sed -n 's/^ *"torch>=\([0-9.]*\).*/\1/p' pyproject.toml)
versions=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do versions+=("$1"); shift; done
[ $# -gt 0 ] && shift
[ ${#versions[@]} -gt 0 ] || versions=("$oldest" newest)
[ $# -gt 0 ] || set -- tests/runtime tests/verification tests/measure tests/training
failed=0
for version in "${versions[@]}"; do
  home=.venv-torch-$version
  case $version in newest) wanted=torch ;; *.*.*) wanted="torch==$version" ;; *) wanted="torch==$version.*" ;; esac
  "$python" -m venv "$home" || exit 2
  grep -v '^torch==' constraints.txt > "$home/constraints.txt"
  export PIP_CONSTRAINT=$home/constraints.txt # in place of any that would hold torch to one version
  if [ -n "${TORCH_INDEX:-}" ]; then where=(--index-url "$TORCH_INDEX"); else where=(); fi
  "$home/bin/python" -m pip install --quiet --upgrade ${where[@]+"${where[@]}"} "$wanted" &&
    "$home/bin/python" -m pip freeze | grep '^torch==' >> "$home/constraints.txt" &&
    "$home/bin/python" -m pip install --quiet --editable '.[dev]' ||
    { echo "torch $version: not installed"; failed=1; continue; }
  found=$("$home/bin/python" -c 'import torch; print(torch.__version__)')
  if "$home/bin/python" -m pytest -q "$@"; then echo "torch $found: passed"; else
    echo "torch $found: FAILED"; failed=1
  fi
done
exit $failed
