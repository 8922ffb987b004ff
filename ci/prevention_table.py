"""The table feature × layout of docs/prevention.md, made from the refusals themselves.

    python ci/prevention_table.py            print it
    python ci/prevention_table.py --write    put it into docs/prevention.md
    python ci/prevention_table.py --check    exit 1 if the page's differs

A cell is what `refuse_what_cannot_work` says to the pair; which of the others a test runs stands in TESTED.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron_stability.config import StabilityConfig
from megatron_stability.errors import UsageError
from megatron_stability.megatron.model import settings
from megatron_stability.numerics.config import Init, Model

PAGE = Path(__file__).resolve().parent.parent / "docs" / "prevention.md"
BEGIN, END = "<!-- table: ci/prevention_table.py -->", "<!-- end of table -->"

FEATURES: dict[str, Model] = {
    "QK-norm `rmsnorm`": Model(qk_norm="rmsnorm"),
    "QK-norm `layernorm`": Model(qk_norm="layernorm"),
    "QK-norm `rms_no_gain`": Model(qk_norm="rms_no_gain"),
    "QK-norm `rmsnorm_whole`": Model(qk_norm="rmsnorm_whole"),
    "attention softcap, `auto`": Model(attention_softcap=50.0),
    "attention softcap, `flex`": Model(attention_softcap=50.0, attention_softcap_kernel="flex"),
    "final softcap": Model(final_softcap=30.0),
    "z-loss": Model(z_loss=1e-4),
    "`init.qk`": Model(init=Init(qk="d_model")),
    "`init.embedding`": Model(init=Init(embedding="d_model")),
    "embedding clip": Model(embedding_norm_clip=1.0),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP": {"tensor_model_parallel_size": 2},
    "TP > groups": {"tensor_model_parallel_size": 4},
    "SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP": {"pipeline_model_parallel_size": 2},
    "VPP": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "DP": {"data_parallel_size": 2},
    "dist. opt.": {"use_distributed_optimizer": True},
    "CP": {"context_parallel_size": 2, "transformer_impl": "transformer_engine"},
    "EP": {"num_experts": 4, "expert_model_parallel_size": 2},
    "MTP": {"mtp_num_layers": 1},
    "MLA": {"multi_latent_attention": True},
    "µP": {"use_mup": True},
    "recompute": {"recompute_granularity": "selective"},
    "local": {},
    "TE": {"transformer_impl": "transformer_engine"},
    "0.18": {},
    "0.19": {},
}
_QK = tuple(feature for feature in FEATURES if feature.startswith("QK-norm"))
_PER_HEAD, _WHOLE = "QK-norm `rmsnorm`", "QK-norm `rmsnorm_whole`"
_CAP, _HEAD = "attention softcap, `auto`", ("final softcap", "z-loss")
_INIT, _CLIP = ("`init.qk`", "`init.embedding`"), "embedding clip"
_RELEASE = (_WHOLE, _CAP, *_HEAD, *_INIT, _CLIP)  # tests/e2e/test_prevention.py: TP 2, SP and MTP in one run
_LAYOUT = (*_QK, _CAP, *_HEAD)  # tests/dist/model/test_prevention_layouts.py
TESTED: dict[str, tuple[str, ...]] = {
    "TP": (*_LAYOUT, *_INIT, _CLIP),
    "TP > groups": (_PER_HEAD, *_HEAD),
    "SP": (*_LAYOUT, *_INIT, _CLIP),
    "PP": (*_LAYOUT, _CLIP),
    "VPP": _LAYOUT,
    "DP": (*_LAYOUT, _CLIP),
    "dist. opt.": (_PER_HEAD, _CAP, _CLIP),
    "EP": _LAYOUT,
    "MTP": (*_LAYOUT, *_INIT, _CLIP),
    "µP": (_PER_HEAD,),
    "recompute": _LAYOUT,
    "local": (*_LAYOUT, *_INIT, _CLIP),
    "0.18": _RELEASE,
    "0.19": (*_LAYOUT, *_INIT, _CLIP),
}
MATHEMATICS: dict[str, tuple[str, ...]] = {"CP": _LAYOUT}  # tests/dist/observe/test_sharded_numerics.py


def arguments(**changes: Any) -> Namespace:
    """Megatron's arguments as far as the refusals read them; 8 heads in 2 groups."""
    base: dict[str, Any] = {
        "spec": ["megatron_stability"],
        "stability_own_model": True,
        "num_attention_heads": 8,
        "num_query_groups": 2,
        "hidden_size": 64,
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
        "transformer_impl": "local",
        "attention_dropout": 0.0,
        "mtp_num_layers": None,
        "embedding_init_method_std": None,
    }
    return Namespace(**base | changes)


def cell(feature: str, layout: str) -> str:
    """✓ a test runs it; ◐ its sharded formulas; ○ built so, not run (no GPU, or no test); — refused at start."""
    config = StabilityConfig(mode="act", model=FEATURES[feature])
    try:
        settings.refuse_what_cannot_work(config, arguments(**LAYOUTS[layout]))
    except UsageError:
        return "—"
    if feature in TESTED.get(layout, ()):
        return "✓"
    return "◐" if feature in MATHEMATICS.get(layout, ()) else "○"


def table() -> str:
    """Markdown."""
    lines = ["| | " + " | ".join(LAYOUTS) + " |", "|---|" + "---|" * len(LAYOUTS)]
    lines += [
        f"| {feature} | " + " | ".join(cell(feature, layout) for layout in LAYOUTS) + " |" for feature in FEATURES
    ]
    return "\n".join(lines)


def main(mode: str = "") -> int:
    """Print, write or check."""
    made = table()
    if not mode:
        print(made)
        return 0
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    wanted = f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"
    if mode == "--write":
        PAGE.write_text(wanted, encoding="utf-8")
        return 0
    if wanted != page:
        print("docs/prevention.md: the table is not what the refusals say; run ci/prevention_table.py --write")
    return int(wanted != page)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
