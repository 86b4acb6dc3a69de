#!/usr/bin/env bash
# What only a GPU can tell, in parts: bash benchmarks/gpu.sh OUT PAIRS, with HH pairs such as hh_train.jsonl.gz.
#
# A part that ended well is kept in OUT and not run again; one that failed or was stopped is run again by the same
# command. OUT/about names the device, the commit and the digest of PAIRS; with others the folder is refused. At the end OUT/results.txt holds every `name: value` line, each name after its part, and OUT/results.json the
# same for docs/measured.md. Without a GPU (or with CPU=1) each part runs small, in two minutes, and shows that it runs.
set -uo pipefail
out=${1:?the folder of the results} pairs=${2-}
cd "$(dirname "$0")/.." && mkdir -p "$out" && out=$(cd "$out" && pwd)
python=${PYTHON:-python}
on_gpu=$([[ -z ${CPU-} ]] && "$python" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")')
failed=()

digest=none
if [[ $pairs ]] && ! digest=$(set -o pipefail; sha256sum < "$pairs" | cut -c -64); then
  echo "PAIRS must be a file of pairs, got $pairs" >&2
  exit 2
fi
about="mode: $([[ $on_gpu ]] && echo gpu || echo cpu)
device: ${on_gpu:-$(uname -m)}
commit: $(git describe --always --dirty --exclude '*' 2> /dev/null || echo unknown)
pairs: $digest"
if compgen -G "$out/*.txt" > /dev/null && [[ $about != "$(cat "$out/about" 2> /dev/null)" ]]; then
  echo "$out holds results that differ in a line of $out/about from this run, which has:" >&2
  echo "$about; name another folder, or empty this one" >&2
  exit 2
fi
echo "$about" > "$out/about"

part() { # NAME SECONDS COMMAND…
  local name=$1 limit=$2
  shift 2
  if [[ -f $out/$name.txt ]]; then echo "=== $name: kept"; return; fi
  echo "=== $name: $*"
  if timeout --kill-after=10 "$limit" "$@" > "$out/$name.log" 2>&1; then
    mv "$out/$name.log" "$out/$name.txt"
  else
    echo "failed with code $?, the end of $out/$name.log:" && tail -n 5 "$out/$name.log"
    failed+=("$name")
  fi
}

if [[ $on_gpu ]]; then
  part tests 600 "$python" -m pytest -m gpu -q
  part parity 600 "$python" benchmarks/gpu.py "$out/parity"
  part large_bases 300 "$python" benchmarks/large_bases.py
  if [[ $pairs ]]; then
    part training 600 "$python" benchmarks/train_throughput.py --pairs "$pairs" --models qwen
    part serving 300 "$python" benchmarks/serving_throughput.py --pairs "$pairs"
  fi
else
  export OMP_NUM_THREADS=1
  part tests 300 "$python" -m pytest -q tests/core/classifier/test_attention.py
  part parity 300 "$python" benchmarks/gpu.py "$out/parity" --cases sgd --workers 1
  if [[ $pairs ]]; then
    part training 300 "$python" benchmarks/train_throughput.py --pairs "$pairs" --steps 1 --rounds 1 --layers 1 --models decoder
  fi
fi

"$python" - "$out" <<'PYTHON'
import json, re, sys
from pathlib import Path

out = Path(sys.argv[1])
found = {}
for file in sorted(out.glob("*.txt")):
    if file.stem != "results":
        lines = re.findall(r"^([a-z0-9_]+): (.+)$", file.read_text(errors="replace"), re.M)
        found[file.stem] = {name: value.strip() for name, value in lines}
(out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
(out / "results.txt").write_text("".join(f"{p}_{n}: {v}\n" for p, lines in found.items() for n, v in lines.items()))
PYTHON
cat "$out/results.txt"
printf 'failed: %s\n' "${#failed[@]}"
exit $((${#failed[@]} > 0))
