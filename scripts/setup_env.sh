#!/usr/bin/env bash
#
# Makes .venv, with this package and what it needs, or sees that it is there already.
#
#   scripts/setup_env.sh [--extras NAME[,NAME...]] [--quiet]
#   scripts/setup_env.sh --find-python
#
#   --extras       extras of setup.py to install; default: dev. Those installed before are kept.
#   --quiet        print nothing when .venv is ready.
#   --find-python  print the Python that .venv would be made with, and do nothing else.
#
# Environment:
#   PYTHON                     the Python to use, a path or a name; nothing else is looked for.
#   LONGSEQ_SKIP_DISK_CHECK=1  install even if the disk looks too small.
#
# .venv/setup.stamp is written last. It holds a hash of what .venv was made from, so that a run
# that finds the same hash is ready at once, and a run after an interrupted one repairs.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
stamp=$venv/setup.stamp
log=$venv/setup.log

say() { printf 'setup: %s\n' "$*" >&2; }

fail() {
    say "$*"
    exit 1
}

usage() { sed -n '3,/^set -/{/^#/!q; s/^# \{0,1\}//; p;}' "${BASH_SOURCE[0]}"; }

# --- Finding a Python ---------------------------------------------------------------------------

# Runs on any Python since 2.7, so that an old one can say how old it is.
probe_program='
import sys
release = sys.version_info
problem = ""
if release < (3, 12):
    problem = "older than 3.12"
elif sys.implementation.name != "cpython":
    problem = "it is %s, and torch has builds for CPython only" % sys.implementation.name
elif release[3] != "final":
    problem = "a pre-release, for which packages have no builds"
else:
    import sysconfig
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        problem = "a build without the GIL, for which packages have no builds"
    try:
        import ensurepip, venv
    except ImportError:
        problem = "no ensurepip, so it makes no .venv: apt install python%d.%d-venv" % release[:2]
print("probe|%d.%d.%d|%s|%s" % (release[0], release[1], release[2], sys.executable, problem))
'

# probe PYTHON: sets `version`, `executable` and `problem`; an empty problem means that it will do.
probe() {
    local output status=0 line tag
    version='' executable='' problem=''
    output=$("$1" -E -c "$probe_program" 2>&1 </dev/null) || status=$?
    while IFS= read -r line; do
        case $line in
            'probe|'*) IFS='|' read -r tag version executable problem <<<"$line" ;;
        esac
    done <<<"$output"
    if [ "$status" -ne 0 ] || [ -z "$version" ]; then
        case $output in
            Traceback*) line=${output##*$'\n'} ;;
            *) line=${output%%$'\n'*} ;;
        esac
        problem="does not run (exit code $status): $line"
    elif [ -n "$problem" ]; then
        problem="Python $version, $problem"
    fi
}

usable=''    # lines "minor source -patch index version executable"; the lowest is the best
rejected=''  # lines for the message when there is none
candidates=0

# minor_number VERSION: 3.12.1 -> 3012, a number to compare.
minor_number() {
    local major minor rest
    IFS=. read -r major minor rest <<<"$1"
    echo $((major * 1000 + minor))
}

# consider SOURCE PYTHON: probes one Python and files it under usable or rejected.
consider() {
    local patch
    case $2 in
        "$venv"/*) return ;;  # .venv cannot be made from itself
    esac
    candidates=$((candidates + 1))
    probe "$2"
    if [ -n "$problem" ]; then
        rejected+="    $2: $problem"$'\n'
        return
    fi
    patch=${version##*.}
    if [ "$1" -eq 1 ]; then patch=0; fi  # on PATH the order of PATH decides, not the patch release
    usable+="$(minor_number "$version") $1 -$patch $candidates $version $executable"$'\n'
}

# Asks about every python3.12, python3.13, ... on PATH, and behind a broken one about the next.
consider_path() {
    local name path
    for name in python3.{12..30} python3 python; do
        while IFS= read -r path; do
            if [ -n "$path" ]; then consider 1 "$path"; fi
        done <<<"$(type -aP "$name" || true)"
    done
}

consider_pyenv() {
    local path
    pyenv_root=$(pyenv root 2>/dev/null || true)
    if [ -z "$pyenv_root" ]; then pyenv_root=${PYENV_ROOT:-${HOME:-/}/.pyenv}; fi
    for path in "$pyenv_root"/versions/*/bin/python3; do
        if [ -x "$path" ]; then consider 2 "$path"; fi
    done
}

# Asks uv only for its own Pythons: it would stop at the first broken one on PATH.
consider_uv() {
    local request path
    uv_found='not on PATH'
    if ! command -v uv >/dev/null; then return; fi
    uv_found='has no Python >= 3.12 of its own'
    for request in '3.12' '>=3.12'; do
        path=$(cd / && UV_PYTHON_PREFERENCE=only-managed UV_PYTHON_DOWNLOADS=never \
            uv python find "$request" 2>/dev/null || true)
        if [ -n "$path" ]; then
            uv_found="offers $path"
            consider 3 "$path"
            return
        fi
    done
}

# Sets `python` and its `version` to the best Python: 3.12, which is what the tests run with, or
# else the lowest newer one; among equals PATH before pyenv before uv.
find_python() {
    local pyenv_root uv_found
    if [ -n "${PYTHON:-}" ]; then
        probe "$PYTHON"
        if [ -n "$problem" ]; then
            fail "PYTHON=$PYTHON will not do: $problem
  Give a CPython >= 3.12 (PYTHON=/path/to/python3.12), or unset PYTHON to have one looked for."
        fi
        python=$executable
        return
    fi
    consider_path
    consider_pyenv
    consider_uv
    if [ -z "$usable" ]; then
        fail "no usable Python >= 3.12.
  Looked at python3.12 and newer, python3 and python on PATH, $pyenv_root/versions and uv:
${rejected:-    found none
}    uv: $uv_found
  Install one in any of these ways, then run the same command again:
    Debian 13, Ubuntu 24.04 or newer:  sudo apt install python3 python3-venv
    uv, on any system:                 uv python install 3.12
    pyenv:                             pyenv install 3.12
  Or name one that is elsewhere:       PYTHON=/path/to/python3.12 make setup"
    fi
    IFS=' ' read -r version python <<<"$(
        sort -n -k1,1 -k2,2 -k3,3 -k4,4 <<<"${usable%$'\n'}" | head -n 1 | cut -d ' ' -f 5-
    )"
}

# --- Is .venv ready? ----------------------------------------------------------------------------

hash_of_input() {
    if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi | cut -d ' ' -f 1
}

# digest VERSION EXTRAS: what .venv depends on. A .venv that was copied elsewhere does not count,
# since its scripts name the place where they were made.
digest() {
    { printf '%s\n' "$1" "$2" "$root" && cat "$root/setup.py" "$root/constraints.txt"; } |
        hash_of_input
}

stamped() { sed -n "s/^$1=//p" "$stamp" 2>/dev/null || true; }

venv_version() {
    "$venv/bin/python" -E -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' \
        2>/dev/null </dev/null || true
}

# Sets `have`, the version of the Python in .venv, and `wanted`, the extras asked for together with
# those there. Succeeds if .venv is what they need.
is_ready() {
    have=$(venv_version)
    wanted=$(printf '%s,%s\n' "$extras" "$(stamped extras)" | tr ',' '\n' | sed '/^$/d' |
        sort -u | paste -sd , -)
    [ -n "$have" ] && [ "$(stamped hash)" = "$(digest "$have" "$wanted")" ] || return 1
    if [ -z "${PYTHON:-}" ]; then return 0; fi
    find_python
    [ "$version" = "$have" ]
}

# --- Making .venv -------------------------------------------------------------------------------

take_lock() {
    # The folder itself is locked: a file in it would not outlive `venv --clear`.
    mkdir -p "$venv"
    if ! command -v flock >/dev/null; then
        say 'flock is not installed: do not run this twice at the same time'
        return
    fi
    exec 9<"$venv"
    if ! flock -n 9; then
        say 'another set-up is at work on .venv; waiting for it'
        flock 9
    fi
}

# Says why the .venv that is there cannot be kept; prints nothing if it can.
why_not_keep() {
    local made_in
    made_in=$(stamped root)
    if [ ! -e "$venv/bin/python" ] && [ ! -L "$venv/bin/python" ]; then
        echo 'missing'
    elif [ -z "$have" ]; then
        echo 'its Python does not run'
    elif [ "$(minor_number "$have")" -lt 3012 ]; then
        echo "its Python is $have, older than 3.12"
    elif [ -n "$made_in" ] && [ "$made_in" != "$root" ]; then
        echo "it was made in $made_in"
    elif [ -n "${PYTHON:-}" ] && [ "$version" != "$have" ]; then
        echo "its Python is $have, and PYTHON=$PYTHON is $version"
    fi
}

make_venv() {
    local output
    output=$("$python" -m venv --clear "$venv" 2>&1 </dev/null) || {
        case $output in
            *ensurepip*) fail "$python cannot make .venv, for want of ensurepip.
  On Debian and Ubuntu: sudo apt install python${version%.*}-venv
  It said: $output" ;;
            *) fail "$python cannot make .venv: $output" ;;
        esac
    }
}

# The default torch on Linux is the CUDA build. With its libraries it fills 5 GB of .venv; 6.5 GB
# was the peak during a measured install, and pip may keep 1.5 GB of downloads in its cache.
check_disk() {
    local free_kib need_gib=8
    if [ "$(uname -s)" != Linux ] || [ "${LONGSEQ_SKIP_DISK_CHECK:-}" = 1 ]; then return; fi
    if compgen -G "$venv/lib/python*/site-packages/torch/version.py" >/dev/null; then return; fi
    free_kib=$(df -Pk "$venv" | awk 'NR == 2 { print $4 }')
    if [ "$free_kib" -lt $((need_gib * 1024 * 1024)) ]; then
        fail "not enough disk for torch and its CUDA libraries: they take about $need_gib GiB, and
  $venv has $((free_kib / 1024)) MiB free. Nothing was downloaded.
  Free some space, or make $venv a link to a folder on a larger disk.
  To try all the same: LONGSEQ_SKIP_DISK_CHECK=1 make setup"
    fi
}

# An install that was killed half-way may leave a package that pip takes for installed. pip writes
# INSTALLER when all other files are there; '~' marks what it had put aside to remove.
drop_half_installed() {
    local folder
    for folder in "$venv"/lib/python*/site-packages/*.dist-info; do
        if [ -d "$folder" ] && [ ! -e "$folder/INSTALLER" ]; then rm -r "$folder"; fi
    done
    rm -rf "$venv"/lib/python*/site-packages/~*
}

# run_logged WHAT COMMAND...: says WHAT and runs the command; its output goes to the log.
run_logged() {
    local what=$1
    shift
    say "$what"
    printf '\n== %s\n' "$what" >>"$log"
    if ! "$@" >>"$log" 2>&1 </dev/null; then
        tail -n 20 "$log" >&2
        fail "failed while $what (the end of $log is above). The next run goes on from here."
    fi
}

pip_install() {
    # Without build isolation: what is built from source needs the torch in .venv, and setuptools
    # is of the pinned version instead of whichever is newest.
    PIP_USER=0 PIP_NO_INPUT=1 DS_BUILD_OPS=0 "$venv/bin/python" -m pip install \
        --disable-pip-version-check --no-warn-script-location --progress-bar off \
        --no-build-isolation -c constraints.txt "$@"
}

install() {
    local reason first_extras
    # Before anything is touched: a machine without a Python keeps what it has.
    if [ -n "${PYTHON:-}" ] || [ -n "$(why_not_keep)" ]; then find_python; fi
    take_lock
    if is_ready; then return; fi  # whoever held the lock has done it
    reason=$(why_not_keep)
    rm -f "$stamp"
    cd "$root"
    if [ -n "$reason" ]; then
        if [ -z "$python" ]; then find_python; fi
        check_disk
        say "making .venv with $python ($reason)"
        make_venv
        have=$(venv_version)
    else
        check_disk
        drop_half_installed
    fi
    : >"$log"
    if ! "$venv/bin/python" -m pip --version >>"$log" 2>&1; then
        run_logged 'adding pip to .venv' "$venv/bin/python" -m ensurepip --upgrade --default-pip
    fi
    run_logged 'installing setuptools' pip_install setuptools
    first_extras=$(tr ',' '\n' <<<"$wanted" | sed '/^bench$/d; /^gpu$/d' | paste -sd , -)
    first_extras=${first_extras:+[$first_extras]}
    run_logged "installing megatron_longseq$first_extras; downloads take minutes (log: $log)" \
        pip_install -e ".$first_extras"
    if [ "$first_extras" != "${wanted:+[$wanted]}" ]; then
        run_logged "installing megatron_longseq[$wanted]; some of it is built from source" \
            pip_install -e ".[$wanted]"
    fi
    run_logged 'checking that torch and Megatron import' \
        "$venv/bin/python" -c 'import torch, megatron.core'
    printf 'hash=%s\nextras=%s\nroot=%s\n' "$(digest "$have" "$wanted")" "$wanted" "$root" \
        >"$stamp.new"
    mv "$stamp.new" "$stamp"
}

# --- The command line ---------------------------------------------------------------------------

extras=dev quiet=0 find_only=0
while [ $# -gt 0 ]; do
    case $1 in
        --extras) extras=${2:?--extras needs a value, such as dev,bench} && shift ;;
        --extras=*) extras=${1#*=} ;;
        --quiet) quiet=1 ;;
        --find-python) find_only=1 ;;
        -h | --help) usage && exit 0 ;;
        *) fail "unknown option $1; see --help" ;;
    esac
    shift
done

python='' version='' executable='' problem='' have='' wanted=''
for extra in ${extras//,/ }; do
    grep -q "^    \"$extra\": \[" "$root/setup.py" ||
        fail "--extras $extras: setup.py has no extra '$extra'; it has" \
            "$(sed -n 's/^    "\([a-z]*\)": \[$/\1/p' "$root/setup.py" | paste -sd ' ' -)"
done
if [ "$find_only" -eq 1 ]; then
    find_python
    printf '%s\n' "$python"
    exit 0
fi
if is_ready; then
    if [ "$quiet" -eq 0 ]; then say ".venv is ready (Python $have; extras $wanted)"; fi
    exit 0
fi
install
say ".venv is ready (Python $have; extras $wanted)"
