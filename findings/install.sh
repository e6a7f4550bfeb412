# Sourced by the scripts: moves to a temporary folder, which goes at the end, and defines `install` and
# `here`, the folder of the scripts.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

# install FOLDER PACKAGE...: make an environment with the packages; exit with 2 if they cannot be had.
install() {
    python3 -m venv "$1"
    "$1/bin/pip" install --quiet --no-compile --disable-pip-version-check "${@:2}" 2>pip.log || { cat pip.log; exit 2; }
}
