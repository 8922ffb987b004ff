#!/usr/bin/env bash
# Makes the project's environment, .venv in its root, from requirements/dev.lock; reuses it when nothing changed.
# Needs Python 3.12 or 3.13 and a package registry. MEGATRON_STABILITY_PYTHON=PATH names the interpreter to use.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
lock=requirements/dev.lock
older=requirements/older-megatron.txt
venv=.venv
older_folder=$venv/megatron-core-0.18.2 # a second Megatron, for tests that put it first on sys.path
owned=$venv/.made-by-ci-env     # written before anything else, so that only an environment of our making is ever removed
packages_stamp=$venv/.packages  # written last: an environment without it is half-made
project_stamp=$venv/.project

say() { printf 'env: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }
for file in "$lock" "$older" setup.py pyproject.toml; do
    [ -r "$file" ] || fail "$root/$file is missing or unreadable; check the project out again."
done
must_be_writable() {
    local folder
    for folder in "$root" "$root/$venv"; do
        [ ! -d "$folder" ] || [ -w "$folder" ] || fail "$folder is read-only; make it writable, or copy the project elsewhere."
    done
}

# Prints what is wrong with interpreter $1, or nothing; $2: the modules it must have.
fault() {
    local answer
    answer=$(PYTHONNOUSERSITE=1 "$1" - "$2" 2>/dev/null <<'PY'
import sys, sysconfig
if sys.version_info[:2] not in ((3, 12), (3, 13)):
    print(f"is Python {sys.version_info[0]}.{sys.version_info[1]}")
elif sysconfig.get_config_var("Py_GIL_DISABLED"):
    print("is a free-threaded build, for which torch's wheels are not made")
else:
    missing = []
    for name in sys.argv[1].split():
        try:
            __import__(name)
        except ImportError:
            missing.append(name)
    print("lacks the module " + ", ".join(missing) if missing else "")
print("ran")
PY
) || true
    case $answer in
        *ran) printf '%s' "${answer%%$'\n'*}" ;;
        *) printf 'does not run' ;;
    esac
}

# Candidates, best first. A name may stand on PATH several times, and the first may be a shim that does not work.
candidates() {
    local folder
    type -aP python3.12 python3.13 python3 || true
    for folder in ${PYENV_ROOT:+"$PYENV_ROOT/versions"} "${HOME:-/nonexistent}/.pyenv/versions"; do
        [ -d "$folder" ] || continue
        find "$folder" -mindepth 1 -maxdepth 1 \( -name '3.12.*' -o -name '3.13.*' \) |
            sort -t. -k2,2n -k3,3n | awk -F/ '{split($NF, v, "."); by[v[2]] = $0 "/bin/python\n" by[v[2]]}
                                              END {printf "%s%s", by[12], by[13]}'
    done
}

find_python() {
    local needed=$1 candidate why="" seen=""
    if [ -n "${MEGATRON_STABILITY_PYTHON:-}" ]; then
        why=$(fault "$MEGATRON_STABILITY_PYTHON" "$needed")
        [ -z "$why" ] || fail "MEGATRON_STABILITY_PYTHON=$MEGATRON_STABILITY_PYTHON $why; give a Python 3.12 or 3.13."
        printf '%s' "$MEGATRON_STABILITY_PYTHON"
        return
    fi
    while IFS= read -r candidate; do
        why=$(fault "$candidate" "$needed")
        [ -n "$why" ] || { printf '%s' "$candidate"; return; }
        seen="$seen${seen:+, }$candidate $why"
    done < <(candidates)
    fail "no usable Python 3.12 or 3.13 (tried: ${seen:-no python3 at all}); install python3.12 with its venv package," \
        "or set MEGATRON_STABILITY_PYTHON to one."
}

# Hash of what the environment is made from, as interpreter $1 sees it: itself, this folder, and the files after it.
fingerprint() {
    "$1" - "$root" "${@:2}" 2>/dev/null <<'PY'
import hashlib, pathlib, sys
h = hashlib.sha256(repr((sys.base_prefix, sys.version, sys.argv[1])).encode())
for name in sys.argv[2:]:
    h.update(pathlib.Path(name).read_bytes())
print(h.hexdigest())
PY
}

stamped() { [ -f "$1" ] && [ -n "$2" ] && [ "$(cat "$1")" = "$2" ]; }

install() { # one command for both installers; the lock is complete, so nothing needs resolving
    if [ -n "$uv" ]; then
        uv pip install --python "$venv/bin/python" --no-deps "$@"
    else
        "$venv/bin/python" -m pip install --disable-pip-version-check --no-deps --no-compile "$@"
    fi
}

make_environment() {
    must_be_writable
    local python modules="ssl ctypes venv"
    [ -n "$uv" ] || modules="$modules ensurepip"
    python=$(find_python "$modules")
    say "1/3 making $venv with $python ($("$python" -V))"
    rm -rf "$venv"
    mkdir "$venv" || fail "cannot create $root/$venv; make the folder writable."
    : >"$owned"
    "$python" -m venv ${uv:+--without-pip} "$venv" || fail "$python could not make a virtual environment in $root/$venv."
    say "2/3 installing $(grep -c '^[a-z]' "$lock") packages with ${uv:-pip} (about 3 GB to download, 5 GB on disk)"
    install -r "$lock" || fail "installing the packages of $lock failed, see above; run this again to start afresh."
    install -r "$older" --target "$older_folder" || fail "installing $older failed, see above; run this again to start afresh."
    fingerprint "$venv/bin/python" "$lock" "$older" >"$packages_stamp.new"
    mv "$packages_stamp.new" "$packages_stamp"
}

uv=""
if uv --version >/dev/null 2>&1; then uv=uv; fi

if command -v flock >/dev/null; then
    exec 9<"$lock"
    flock -n 9 || { say "waiting for another ci/env.sh in this folder"; flock -w 3600 9 || fail "another ci/env.sh has held the lock for an hour."; }
fi

if [ -e "$venv" ] || [ -L "$venv" ]; then
    [ -f "$owned" ] || fail "$root/$venv was not made by ci/env.sh; move it away and run this again."
fi
wanted=${MEGATRON_STABILITY_PYTHON:-$venv/bin/python}
if ! { "$venv/bin/python" -c "" 2>/dev/null && stamped "$packages_stamp" "$(fingerprint "$wanted" "$lock" "$older" || true)"; }; then
    make_environment
fi
project=$(fingerprint "$venv/bin/python" setup.py pyproject.toml)
if ! stamped "$project_stamp" "$project"; then
    must_be_writable
    say "3/3 installing this project, editable"
    install --no-build-isolation -e . || fail "installing the project itself failed, see above."
    printf '%s\n' "$project" >"$project_stamp"
fi
say "ready: $root/$venv"
