"""Rewinds by relaunch and plain resumes under Megatron-Bridge on every layout, by hand:

PYTHONPATH=.nemo:. .venv/bin/python -m tests.drills.bridge_rewinds docs/drills/bridge_rewinds.json
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.results import PLUGIN, Results
from tests.dist.pool import Pool
from tests.nemo import jobs, rewinds

MUON = {"optimizer.optimizer": "muon"}
OVERLAP = {"ddp.overlap_grad_reduce": True, "ddp.overlap_param_gather": True, "optimizer.overlap_param_gather": True}
VPP2 = {"model.virtual_pipeline_model_parallel_size": 2, "model.num_layers": 4}
MOE = {
    "model.num_moe_experts": 4,
    "model.moe_router_topk": 2,
    "model.moe_router_score_function": "sigmoid",
    "model.moe_router_enable_expert_bias": True,
    "model.moe_router_load_balancing_type": "none",
    "model.moe_ffn_hidden_size": 32,
    "model.moe_token_dispatcher_type": "alltoall",
    "model.moe_permute_fusion": False,
}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "TP2": (jobs.TP2, 2),
    "PP2": (jobs.PP2, 2),
    "DP2, distributed optimizer": (jobs.SHARDED, 2),
    "DP2, distributed optimizer, overlap of gradients and gathers": (jobs.SHARDED | OVERLAP, 2),
    "PP2, VPP2": (jobs.PP2 | VPP2, 2),
    "DP2, MoE with expert bias": (jobs.SHARDED | MOE, 2),
    "TP2 x PP2": (jobs.TP2 | jobs.PP2, 4),
    "TP2, Muon": (jobs.TP2 | MUON, 2),
}


def main(out: Path) -> int:
    """Run every case and write the findings; 1 if there is any."""
    pool, results = Pool(jobs.bridge), Results(out, (*PLUGIN, "tests/nemo", "tests/drills/bridge_rewinds.py"))
    for name, (layout, world) in CASES.items():
        if name in results.rows:
            continue
        with tempfile.TemporaryDirectory() as folder:
            rewind = rewinds.compare(pool, layout, world, Path(folder))
            resumed = rewinds.resume(pool, layout, world, Path(folder))
        results.put(name, {"world": world, "rewind": rewind, "resume": resumed})
        print(name, results.rows[name], flush=True)
    pool.close()
    return int(any(result[kind]["findings"] for result in results.rows.values() for kind in ("rewind", "resume")))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
