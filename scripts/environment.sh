# Sourced by run.sh, test.sh and .ci/*: builds the project's virtual environment once and puts it first on PATH.
# HEADRACE_VENV chooses its folder (default: .venv in the checkout), PYTHON the interpreter (default: python3),
# HEADRACE_EXTRAS what is installed beside headrace itself (default: dev, for the tests; run.sh asks for nothing more).
# The environment is completed when more is asked for, and brought up to date when pyproject.toml or constraints.txt change.

headrace_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
headrace_venv=${HEADRACE_VENV:-$headrace_root/.venv}
headrace_extras=${HEADRACE_EXTRAS-dev}
headrace_stamp=$headrace_venv/ready-$(cat "$headrace_root/pyproject.toml" "$headrace_root/constraints.txt" | sha256sum | cut -c1-16)

headrace_is_ready() {  # for nothing beside headrace, an environment with more will do
    if [ -n "$headrace_extras" ]; then [ -f "$headrace_stamp-$headrace_extras" ]; else compgen -G "$headrace_stamp-*" >/dev/null; fi
}
if ! headrace_is_ready; then
    python=${PYTHON:-python3}
    if ! "$python" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))'; then
        echo "headrace needs Python 3.11 or newer; set PYTHON to such an interpreter ('$python' is not one)." >&2
        exit 2
    fi
    echo "setting up $headrace_venv (once; a minute or a few)" >&2
    [ -x "$headrace_venv/bin/python" ] || "$python" -m venv "$headrace_venv"
    "$headrace_venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        -c "$headrace_root/constraints.txt" -e "$headrace_root${headrace_extras:+[$headrace_extras]}"
    touch "$headrace_stamp-${headrace_extras:-plain}"
fi
export PATH="$headrace_venv/bin:$PATH"
