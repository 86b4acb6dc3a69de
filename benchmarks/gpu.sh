#!/usr/bin/env bash
# What only a GPU can tell, in parts: bash benchmarks/gpu.sh OUT PAIRS, with HH pairs such as hh_train.jsonl.gz.
#
# VLLM_PYTHON names the Python of an environment with vLLM, beside which the server is measured. The last lines' table is
# taken into a page by: python benchmarks/gpu_parts.py collect OUT --into docs/measured.md
#
# A part that ended well is kept in OUT and not run again; one that failed or was stopped leaves its log and is run again by the same
# command. OUT/about names the device, the commit and the digest of PAIRS; with others the folder is refused. At the end OUT/results.txt
# holds every `name: value` line, each name after its part, and OUT/results.json the same. Without a GPU (or with CPU=1) each part runs
# small, two at a time and in two minutes, and shows that it runs.
set -uo pipefail
out=${1:?the folder of the results} pairs=${2-}
cd "$(dirname "$0")/.." && mkdir -p "$out" && out=$(cd "$out" && pwd)
python=${PYTHON:-python}
on_gpu=$([[ -z ${CPU-} ]] && "$python" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")')

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
    echo "$name failed with code $?, the end of $out/$name.log:" && tail -n 5 "$out/$name.log"
  fi
}

parts=benchmarks/gpu_parts.py
beside_vllm=(${VLLM_PYTHON:+--vllm-python "$VLLM_PYTHON"})
if [[ $on_gpu ]]; then
  from=(${pairs:+--pairs "$pairs"})
  part tests 900 "$python" -m pytest -m gpu -q
  part parity 600 "$python" benchmarks/gpu.py "$out/parity"
  for name in adapter full compile attention transfer; do part "$name" 500 "$python" $parts "$name" "${from[@]}"; done
  if [[ $pairs ]]; then
    part training 600 "$python" benchmarks/train_throughput.py --pairs "$pairs" --models qwen
    part serving 300 "$python" benchmarks/serving_throughput.py --pairs "$pairs" "${beside_vllm[@]}"
  fi
else
  export OMP_NUM_THREADS=1
  if [[ ! $pairs ]]; then # short ones
    pairs=$out/pairs.jsonl
    "$python" -c 'import json; from rm_optimizer import PreferenceWorld
for pair in PreferenceWorld(seed=0).pairs(150, 1).train:
    print(json.dumps({"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected}))' > "$pairs"
  fi
  {
    part tests 300 "$python" -m pytest -q tests/core/classifier/test_attention.py -k "mask or flash"
    part parity 300 "$python" benchmarks/gpu.py "$out/parity" --cases sgd --workers 1
    part training 300 "$python" benchmarks/train_throughput.py --pairs "$pairs" --steps 1 --rounds 1 --layers 1 --models decoder
    part serving 300 "$python" benchmarks/serving_throughput.py --pairs "$pairs" --layers 1 --rounds 1 --singles 4 --groups 1 \
      --clients 2 --requests 1 "${beside_vllm[@]}"
  } &
  for name in adapter full compile attention transfer; do part "$name" 300 "$python" $parts "$name" --small; done
  wait
fi

"$python" $parts collect "$out"
cat "$out/results.txt"
failed=$(compgen -G "$out/*.log" | wc -l)
echo "failed: $failed"
exit $((failed > 0))
