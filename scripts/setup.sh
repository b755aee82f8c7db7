#!/usr/bin/env bash
# Makes .venv with pinned dependencies. Run by `make`; safe to run again; does nothing when all is fresh.
#
#   scripts/setup.sh                     set up where needed
#   PYTHON=python3.12                    choose the interpreter (3.11 to 3.13)
#   KOPIR_ACCELERATOR=cpu|cuda12|cuda13  choose the build instead of looking for a GPU
#   KOPIR_TORCH_INDEX=URL                take torch from this package index
set -euo pipefail
cd "$(dirname "$0")/.."

readonly STAMP=.venv/.setup-stamp
readonly TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu  # PyTorch's own index of CPU builds

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

is_fresh() {
  [[ -x .venv/bin/kopir && -f $STAMP ]] || return 1
  local source
  for source in pyproject.toml constraints.txt constraints-cuda12.txt constraints-cuda13.txt scripts/setup.sh; do
    [[ $STAMP -nt $source ]] || return 1
  done
  [[ "$(cat "$STAMP")" == "$(accelerator) $PWD" ]]
}

# A Python that can be used: 3.11 to 3.13. The first that fits wins.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python 3.11 to 3.13 found; install one (Debian, Ubuntu: apt install python3 python3-venv) or set PYTHON=..."
}

make_venv() {
  local python
  python=$(find_python)
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    fail "$python has no venv module; install it: apt install python3-venv"
  fi
  say "making .venv with $("$python" --version)"
  "$python" -m venv --clear .venv
}

driver_major() {
  local version=""
  if command -v nvidia-smi >/dev/null; then
    version=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || version=""
  fi
  if [[ -z $version && -r /proc/driver/nvidia/version ]]; then
    version=$(grep -oE '[0-9]{3,}\.[0-9]+' /proc/driver/nvidia/version | head -n 1) || version=""
  fi
  version=${version%%.*}
  [[ $version =~ ^[0-9]+$ ]] && echo "$version" || echo 0
}

# Which extra to install. CUDA 13 needs driver 580, CUDA 12 driver 525.
accelerator() {
  if [[ -n ${KOPIR_ACCELERATOR:-} ]]; then
    echo "$KOPIR_ACCELERATOR"
    return
  fi
  local driver
  driver=$(driver_major)
  if ((driver >= 580)); then echo cuda13; elif ((driver >= 525)); then echo cuda12; else echo cpu; fi
}

has_pinned_torch() {
  .venv/bin/python -c 'import importlib.metadata as m, sys; sys.exit(m.version("torch").split("+")[0] != sys.argv[1])' \
    "${1#torch==}" 2>/dev/null
}

# Without a GPU the default wheel of torch would bring gigabytes of CUDA libraries: then the CPU build is taken. The
# default wheel wants CUDA 13, so a driver that only knows CUDA 12 gets the CPU build too, unless an index is named.
install_torch() {
  local extra=$1 pin report
  local -a index=()
  pin=$(grep '^torch==' constraints.txt)
  if has_pinned_torch "$pin"; then return; fi
  if [[ -n ${KOPIR_TORCH_INDEX:-} ]]; then
    index=(--index-url "$KOPIR_TORCH_INDEX")
  elif [[ $extra != cuda13 ]]; then
    report=$(mktemp)
    .venv/bin/python -m pip install -qq --dry-run --report "$report" -c constraints.txt "$pin"
    if .venv/bin/python scripts/needs_cuda_wheels.py "$report"; then index=(--index-url "$TORCH_CPU_INDEX"); fi
    rm -f "$report"
    if [[ $extra == cuda12 ]]; then
      say "the default build of $pin needs driver 580: taking the CPU build (KOPIR_TORCH_INDEX names another index)"
    fi
  fi
  say "installing $pin"
  .venv/bin/python -m pip install -qq "${index[@]}" -c constraints.txt "$pin"
}

main() {
  local extra cuda_pins
  if is_fresh; then return; fi
  extra=$(accelerator)
  case $extra in
    cpu | cuda12) cuda_pins=constraints-cuda12.txt ;;
    cuda13) cuda_pins=constraints-cuda13.txt ;;
    *) fail "KOPIR_ACCELERATOR must be cpu, cuda12 or cuda13, not $extra" ;;
  esac
  # Also catches an environment that was half made, or whose Python is gone.
  .venv/bin/python -m pip --version >/dev/null 2>&1 || make_venv
  install_torch "$extra"
  say "installing Kopir with the extras $extra and dev (some minutes the first time)"
  .venv/bin/python -m pip install -qq -c constraints.txt -c "$cuda_pins" -e ".[$extra,dev]"
  .venv/bin/python -m workers.model.native.library >&2
  printf '%s %s\n' "$extra" "$PWD" >"$STAMP"
  say "done"
}

main "$@"
