# Sourced by run.sh, test.sh and .ci/*: builds the project's virtual environment once and puts it first on PATH.
# HEADRACE_VENV chooses its folder (default: .venv in the checkout), PYTHON the interpreter (default: python3).
# The environment is rebuilt when pyproject.toml or constraints.txt change.

headrace_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
headrace_venv=${HEADRACE_VENV:-$headrace_root/.venv}
headrace_stamp=$headrace_venv/ready-$(cat "$headrace_root/pyproject.toml" "$headrace_root/constraints.txt" | sha256sum | cut -c1-16)

if [ ! -f "$headrace_stamp" ]; then
    python=${PYTHON:-python3}
    if ! "$python" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))'; then
        echo "headrace needs Python 3.11 or newer; set PYTHON to such an interpreter ('$python' is not one)." >&2
        exit 2
    fi
    echo "setting up $headrace_venv (once; a few minutes)" >&2
    "$python" -m venv "$headrace_venv"
    "$headrace_venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        -c "$headrace_root/constraints.txt" -e "$headrace_root[dev]"
    touch "$headrace_stamp"
fi
export PATH="$headrace_venv/bin:$PATH"
