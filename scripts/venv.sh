#!/bin/sh
# Make the virtual environment .venv in the checkout and install loglib in it, editable, with all that developing takes.
# Usage: venv.sh   The interpreter is $PYTHON, or else the first Python 3.11 or newer found on the PATH.
set -eu
cd "$(dirname "$0")/.."

usable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
has_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

install() {
    echo "setup: installing loglib and its tools (PySpark is a download of 450 MB: this takes a few minutes, once)"
    .venv/bin/python -m pip install -qq --disable-pip-version-check -e '.[dev]'
    rm -f .venv/installed-*
    echo "setup: done"
}

# An environment from before, which pyproject.toml has moved on from, is brought up to date.
if usable .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1; then
    install
    exit
fi

# One that can make an environment at once is preferred to a newer one that lacks a part.
python="" incomplete=""
for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
    usable "$candidate" || continue
    if has_venv "$candidate"; then
        python=$candidate
        break
    fi
    incomplete=${incomplete:-$candidate}
done

if [ -z "$python" ] && [ -n "$incomplete" ]; then
    version=$("$incomplete" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    scripts/apt-install.sh "python$version-venv" python3-venv || true
    if ! has_venv "$incomplete"; then
        echo "setup: $incomplete cannot make virtual environments; install its venv package (Debian, Ubuntu: apt-get install python$version-venv)" >&2
        exit 1
    fi
    python=$incomplete
fi
if [ -z "$python" ]; then
    echo "setup: no Python 3.11 or newer found; install one, or name it: make PYTHON=/path/to/python3" >&2
    exit 1
fi

echo "setup: making .venv with $("$python" -V)"
"$python" -m venv --clear .venv
install
