"""Two processes with shares of the pairs find the spectrum of one with all of them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from rm_optimizer.landscape import HessianAnalyzer, SpectrumOptions
from tests.landscape.worlds import EVERYTHING, micro_batches, pairs, reward_model

RANK = """
import json, sys
import torch, torch.distributed as dist
from rm_optimizer.landscape import HessianAnalyzer, SpectrumOptions
from tests.landscape.worlds import EVERYTHING, micro_batches, pairs, reward_model

rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
model = reward_model("llama")
share = micro_batches(model, 120, data=(pairs()[:7], pairs()[7:])[rank])
analyzer = HessianAnalyzer(model, loss=EVERYTHING, dtype=torch.float64, group=dist.group.WORLD)
options = SpectrumOptions(tolerance=1e-6, product="reverse", num_probes=3)
spectrum = analyzer.compute_spectrum(share, top_k=2, options=options)
open(f"{out}/{rank}.json", "w").write(spectrum.to_json())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_find_what_one_finds(python: Path, tmp_path: Path):
    command = [str(python), "-W", "ignore", "-c", RANK]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), str(tmp_path)], env=environment)
        for rank in range(2)
    ]
    assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    model = reward_model("llama")
    one = HessianAnalyzer(model, loss=EVERYTHING, dtype=torch.float64).compute_spectrum(
        micro_batches(model, data=pairs()),
        top_k=2,
        options=SpectrumOptions(tolerance=1e-6, product="reverse", num_probes=3),
    )
    assert found[0]["eigenvalues"] == found[1]["eigenvalues"]
    assert found[0]["eigenvalues"] == pytest.approx(one.eigenvalues, rel=1e-7)
    assert found[0]["trace"]["value"] == pytest.approx(one.trace.value, rel=1e-7)  # type: ignore[union-attr]
    assert found[0]["loss"] == pytest.approx(one.loss, rel=1e-12)
    assert found[0]["num_pairs"] == one.num_pairs == 8
