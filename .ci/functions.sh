# What .ci/run and .ci/nightly share. Source it from the project's root.

# Print the path of the interpreter of a version, on PATH or under pyenv; print nothing if there is none.
find_python() {
  local candidate version=$1
  for candidate in "python$version" "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$version"*/bin/"python$version" python3 python; do
    # A pyenv shim exists for versions that are not switched on, so being on PATH proves nothing.
    if "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
}

environments=$(mktemp -d)
trap 'rm -rf "$environments"' EXIT

# Create a virtual environment in which the project is installed with an extra, and with anything else that is named. The pip of
# Python 3.11 searches for minutes for releases of the extra "dev" that fit together, a new one for half a minute.
make_environment() {
  local interpreter=$1 name=$2 extras=$3
  shift 3
  "$interpreter" -m venv "$environments/$name"
  "$environments/$name/bin/python" -m pip install --quiet --upgrade pip || echo "pip stays as old as $interpreter."
  "$environments/$name/bin/python" -m pip install --quiet --no-compile -e ".[$extras]" "$@"
}

interpreter=$(find_python 3.11)
if [ -z "$interpreter" ]; then
  echo "Python 3.11 was not found on PATH or under pyenv." >&2
  exit 1
fi

# Without PgBouncer, the tests of poolers are skipped and say why.
install_pgbouncer() {
  command -v pgbouncer >/dev/null && return
  { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq pgbouncer; } >/dev/null 2>&1 \
    || echo "PgBouncer is missing, and could not be installed."
}

# Hundreds of interpreters start: each of them would compile the package again.
unset PYTHONDONTWRITEBYTECODE

# Tests wait for locks, leases and processes that end: one worker more than there are cores keeps these busy.
export PYTEST_XDIST_AUTO_NUM_WORKERS=$(($(nproc) + 1))

status=0
logs=()
started() {
  printf '\n+ %s (after %d:%02d)\n' "$1" $((SECONDS / 60)) $((SECONDS % 60))
}

# Run a step, keep its output for `finish`, and go on if it fails.
run() {
  local name=$1 log code=0
  shift
  log=$(mktemp "$environments/step.XXXXXX")
  logs+=("$log")
  started "$name"
  "$@" 2>&1 | tee "$log" || code=$?
  if [ "$code" != 0 ]; then
    status=$code
    printf 'FAILED with exit code %s: %s\n' "$code" "$name" | tee -a "$log"
  fi
}

# Run a lane, which is a function of steps, in the background. `join` prints its output and takes over its failures.
declare -A lanes
background() {
  local lane=$1
  (
    status=0 logs=()
    "$lane"
    printf '%s\n' "${logs[@]}" >"$environments/$lane.logs"
    exit "$status"
  ) >"$environments/$lane.out" 2>&1 &
  lanes[$lane]=$!
}
join() {
  local lane=$1
  wait "${lanes[$lane]}" || status=$?
  cat "$environments/$lane.out"
  mapfile -t -O "${#logs[@]}" logs <"$environments/$lane.logs"
}

# Print the closing line of a step's tests, then what has failed, because that is far above by now; and exit.
finish() {
  local log
  printf '\nFinished after %d minutes and %d seconds.\n' $((SECONDS / 60)) $((SECONDS % 60))
  tail -n 1 "$1"
  for log in "${logs[@]}"; do
    grep -hE '^FAILED with exit code ' "$log" || true
  done
  for log in "${logs[@]}"; do
    sed -n '/^=* \(FAILURES\|ERRORS\) =*$/,/^=* \(slowest\|short test summary\)/p' "$log" | tail -n 80
    grep -hE '^(FAILED|ERROR) ' "$log" | grep -v '^FAILED with exit code' || true
  done
  exit "$status"
}
