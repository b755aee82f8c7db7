#!/usr/bin/env bash
# Makes an environment of programs that tests run unmodified against a cluster. Run by the tests that need one; does
# nothing when it is fresh. Exit status 75 when the package index cannot be reached.
#
#   scripts/clients.sh libraries   .venv-clients: an older major version of openai than .venv has, LangChain's ChatOpenAI,
#                                  LlamaIndex's OpenAI class for servers with models of other names
#   scripts/clients.sh load        .venv-load: guidellm, the last version that runs without torch
set -euo pipefail
cd "$(dirname "$0")/.."

readonly UNREACHABLE=75

case ${1:-} in
  libraries)
    readonly FOLDER=.venv-clients PINS=constraints-clients.txt
    readonly PACKAGES=(openai langchain-openai llama-index-llms-openai-like)
    ;;
  load)
    readonly FOLDER=.venv-load PINS=constraints-load.txt
    readonly PACKAGES=(guidellm)
    ;;
  *)
    printf 'clients: error: name an environment: libraries or load, not "%s"\n' "${1:-}" >&2
    exit 2
    ;;
esac
readonly STAMP=$FOLDER/.setup-stamp

is_fresh() { [[ -f $STAMP && $STAMP -nt $PINS && $STAMP -nt scripts/clients.sh && "$(cat "$STAMP")" == "$PWD" ]]; }

if is_fresh; then exit 0; fi
# Two test runs in one tree: the second waits and finds it made.
exec 9>"$FOLDER.lock"
flock 9
if is_fresh; then exit 0; fi
printf 'clients: installing %s into %s (a minute or two the first time)\n' "${PACKAGES[*]}" "$FOLDER" >&2
.venv/bin/python -m venv --clear "$FOLDER"
readonly LOG=$FOLDER/.setup-log
if ! "$FOLDER/bin/python" -m pip install -q --no-compile --timeout 20 --retries 2 -c "$PINS" "${PACKAGES[@]}" 2>"$LOG" 9>&-; then
  cat "$LOG" >&2
  # pip says "no matching version" both of an index that it cannot reach and of a wrong pin; before the first it retries.
  if grep -qE 'connection broken by|ReadTimeoutError|ConnectTimeoutError' "$LOG"; then
    printf 'clients: the package index cannot be reached, so %s was not made\n' "$FOLDER" >&2
    exit "$UNREACHABLE"
  fi
  exit 1
fi
printf '%s\n' "$PWD" >"$STAMP"
